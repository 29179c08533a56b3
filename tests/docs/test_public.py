"""What the package promises: these names, and nothing else."""

from __future__ import annotations

from importlib import metadata

import pytest

import rowstep


def test_the_public_names() -> None:
    assert rowstep.__all__ == [
        "DeferredAdam",
        "DeferredAdamW",
        "SparseAdam",
        "StaleRowsError",
        "clip_grad_norm_",
        "clip_grad_value_",
        "select_rows_",
    ]
    assert set(rowstep.__all__) <= set(dir(rowstep))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'rowstep' has no attribute 'DenseAdam'"):
        _ = rowstep.DenseAdam


def test_the_version_is_the_installed_one() -> None:
    assert rowstep.__version__ == metadata.version("rowstep")
