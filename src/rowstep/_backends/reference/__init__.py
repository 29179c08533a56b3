"""The specification: both updates in plain torch operations, on any device, dtype and layout."""

from .adam import first_outside, has_nonfinite, norm, update
from .catch_up import catch_up, count_stale, mark

__all__ = ["catch_up", "count_stale", "first_outside", "has_nonfinite", "mark", "norm", "update"]
