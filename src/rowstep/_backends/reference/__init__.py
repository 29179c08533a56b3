"""The specification: both updates in plain torch operations, on any device, dtype and layout."""

from .adam import Launch, first_outside, norm
from .catch_up import catch_up

catch_up_in_finalizer = catch_up  # as it compiles nothing and takes no lock

__all__ = ["Launch", "catch_up", "catch_up_in_finalizer", "first_outside", "norm"]
