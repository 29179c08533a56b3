"""The specification: both updates in plain torch operations, on any device, dtype and layout."""

from .adam import Launch, first_outside, norm
from .catch_up import catch_up

__all__ = ["Launch", "catch_up", "first_outside", "norm"]
