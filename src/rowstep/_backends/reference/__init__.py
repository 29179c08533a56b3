"""The specification: both updates in plain torch operations, on any device, dtype and layout."""

from .adam import first_outside, has_nonfinite, norm, update
from .catch_up import catch_up, look_at

__all__ = ["catch_up", "first_outside", "has_nonfinite", "look_at", "norm", "update"]
