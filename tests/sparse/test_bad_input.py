"""Bad input raises a sentence that says what is wrong where, and no tensor has changed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import Snapshot, entries_of, rows_of, set_grad, sparse, table

NAN, INF = math.nan, math.inf

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, r"Invalid learning rate: -1.0.*expected .*0"),
    ({"lr": NAN}, r"Invalid learning rate: nan.*expected"),
    ({"lr": INF}, r"Invalid learning rate: inf.*expected"),
    ({"lr": torch.tensor([0.1, 0.2])}, r"Tensor lr must be 1-element"),
    ({"lr": torch.tensor([])}, r"Tensor lr must be 1-element"),
    ({"lr": torch.tensor(NAN)}, r"Invalid learning rate: nan.*expected"),
    ({"eps": 0.0}, r"Invalid epsilon value: 0.0.*expected .*> 0"),
    ({"eps": -1e-8}, r"Invalid epsilon value: -1e-08.*expected .*> 0"),
    ({"eps": NAN}, r"Invalid epsilon value: nan.*expected .*> 0"),
    ({"betas": (1.0, 0.999)}, r"Invalid beta parameter at index 0: 1.0.*expected .*\[0, 1\)"),
    ({"betas": (-0.1, 0.999)}, r"Invalid beta parameter at index 0: -0.1.*expected .*\[0, 1\)"),
    ({"betas": (0.9, 1.5)}, r"Invalid beta parameter at index 1: 1.5.*expected .*\[0, 1\)"),
    ({"betas": (0.9, NAN)}, r"Invalid beta parameter at index 1: nan.*expected .*\[0, 1\)"),
    ({"betas": (0.9,)}, r"Invalid betas: \(0.9,\).*expected two numbers"),
    ({"betas": (0.9, 0.9, 0.9)}, r"Invalid betas: .*expected two numbers"),
    ({"weight_decay": -0.1}, r"Invalid weight_decay value: -0.1.*expected .*>= 0"),
    ({"weight_decay": NAN}, r"Invalid weight_decay value: nan.*expected .*>= 0"),
    ({"weight_decay": INF}, r"Invalid weight_decay value: inf.*expected .*>= 0"),
    ({"bias_correction": "rows"}, r"Invalid bias_correction: 'rows'.*expected 'global' or 'row'"),
    ({"bias_correction": None}, r"Invalid bias_correction: None.*expected 'global' or 'row'"),
    ({"nonfinite": "ignore"}, r"Invalid nonfinite: 'ignore'.*expected 'propagate' or 'skip' or 'raise'"),
    ({"amsgrad": "yes"}, r"Invalid amsgrad: 'yes'.*expected False or True"),
    ({"maximize": 2}, r"Invalid maximize: 2.*expected False or True"),
    ({"force_sparse": "no"}, r"Invalid force_sparse: 'no'.*expected False or True"),
    ({"decoupled_weight_decay": None}, r"Invalid decoupled_weight_decay: None.*expected False or True"),
]
ids = [str(options) for options, _ in BAD_OPTIONS]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=ids)
def test_an_option_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAdam([table(2, 2)], **options)


@pytest.mark.parametrize("lr", [0.0, -0.0, torch.tensor(0.0)])
def test_a_default_learning_rate_of_zero(lr: float | Tensor) -> None:
    with pytest.raises(ValueError, match=r"Invalid learning rate: -?0\.0.*expected .*> 0"):
        SparseAdam([table(2, 2)], lr=lr)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=ids)
def test_an_option_out_of_range_in_a_group_names_the_group(options: dict[str, Any], message: str) -> None:
    first, second = table(2, 2), table(2, 2)
    with pytest.raises(ValueError, match=message) as caught:
        SparseAdam([{"params": [first]}, {"params": [second], **options}])
    assert "in group 1" in str(caught.value)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=ids)
def test_an_added_group_that_is_refused_is_not_added(options: dict[str, Any], message: str) -> None:
    first, second = table(2, 2), table(2, 2)
    optimizer = SparseAdam([first])
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.add_param_group({"params": [second], **options})
    assert "in group 1" in str(caught.value)
    assert [group["params"] for group in optimizer.param_groups] == [[first]]
    optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=ids)
def test_a_loaded_option_out_of_range_leaves_the_optimizer_as_it_was(options: dict[str, Any], message: str) -> None:
    param = table(2, 2)
    optimizer = SparseAdam([param], lr=0.25)
    before = optimizer.state_dict()
    bad = SparseAdam([table(2, 2)]).state_dict()
    bad["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(bad)
    assert "group 0" in str(caught.value)
    assert optimizer.state_dict() == before


def test_sparse_parameters_are_refused_with_their_positions() -> None:
    dense, bad = table(2, 2), table(2, 2).detach().to_sparse()
    with pytest.raises(ValueError, match=re.escape("Sparse params at indices [[0, 1], [1, 0]]: SparseAdam requires")):
        SparseAdam([{"params": [dense, bad]}, {"params": [bad.clone()]}])


def test_complex_parameters_are_refused_with_their_positions() -> None:
    dense, bad = table(2, 2), Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=re.escape("Complex params at indices [[1, 1]]: SparseAdam does not support")):
        SparseAdam([{"params": [table(1)]}, {"params": [dense, bad]}])


def test_the_error_of_sparse_parameters_comes_first() -> None:
    bad = Parameter(torch.zeros(2, dtype=torch.complex64)), torch.zeros(2, 2).to_sparse()
    with pytest.raises(ValueError, match=re.escape("Sparse params at indices [[0, 1]]")):
        SparseAdam(bad)


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse()])
def test_added_parameters_are_refused_with_their_positions(bad: Tensor) -> None:
    optimizer = SparseAdam([table(2, 2)])
    with pytest.raises(ValueError, match=re.escape("params at indices [[1, 1]]")):
        optimizer.add_param_group({"params": [table(2, 2), bad]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_parameters_of_every_sparse_layout_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Sparse params at indices [[0, 1]]")):
        SparseAdam([table(2, 2), torch.ones(2, 2).to_sparse_csr()])


def test_what_torch_refuses_is_refused() -> None:
    param = table(2, 2)
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        SparseAdam(param)
    with pytest.raises(ValueError, match="empty parameter list"):
        SparseAdam([])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        SparseAdam(["weights"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="non-leaf"):
        SparseAdam([param * 2])
    with pytest.raises(ValueError, match="more than one parameter group"):
        SparseAdam([{"params": [param]}, {"params": [param]}])


def outside(index: int, dense_dim: int = 1) -> Callable[[Parameter], None]:
    def spoil(param: Parameter) -> None:
        indices = [[0, index, 1]] if dense_dim else [[0, 1, 1], [0, index, 1]]
        param.grad = sparse(indices, torch.ones((3, 2)[: 1 + dense_dim]), (4, 2), checked=False)

    return spoil


def wrong_shape(param: Parameter) -> None:
    param.grad = rows_of(param, [0, 3])
    param.data = torch.ones(3, 2)


def wrong_dense_shape(param: Parameter) -> None:
    param.grad = torch.ones(4, 2)
    param.data = torch.ones(8)


def wrong_dtype(param: Parameter) -> None:
    set_grad(param, sparse([[0, 1]], torch.ones(2, 2, dtype=torch.int64), (4, 2)))


def complex_dtype(param: Parameter) -> None:
    set_grad(param, torch.ones(4, 2, dtype=torch.complex64))


def state_of_another_shape(param: Parameter) -> None:
    param.data = torch.ones(5, 2)
    param.grad = rows_of(param, [0, 4])


BAD_GRADIENTS: list[tuple[Callable[[Parameter], None], type[Exception], str]] = [
    (outside(4), IndexError, r"index 4 .*expected 0 <= index < 4"),
    (outside(-1), IndexError, r"index -1 .*expected 0 <= index < 4"),
    (outside(2**62), IndexError, rf"index {2**62} .*expected 0 <= index < 4"),
    (outside(2, dense_dim=0), IndexError, r"index 2 in dimension 1.*expected 0 <= index < 2"),
    (outside(-1, dense_dim=0), IndexError, r"index -1 in dimension 1.*expected 0 <= index < 2"),
    (wrong_shape, ValueError, r"shape \(4, 2\).*expected .*\(3, 2\)"),
    (wrong_dense_shape, ValueError, r"shape \(4, 2\).*expected .*\(8,\)"),
    (wrong_dtype, TypeError, r"dtype torch.int64.*expected a 16-, 32- or 64-bit floating-point dtype"),
    (complex_dtype, TypeError, r"dtype torch.complex64.*expected a 16-, 32- or 64-bit floating-point dtype"),
    (state_of_another_shape, ValueError, r"'exp_avg' is \(4, 2\).*expected .*the parameter, which is \(5, 2\)"),
]
BAD_IDS = ["4", "-1", "2**62", "column 2", "column -1", *(spoil.__name__ for spoil, _, _ in BAD_GRADIENTS[5:])]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "raise", "bias_correction": "row"}, {"force_sparse": True}], ids=str
)
@pytest.mark.parametrize(("spoil", "error", "message"), BAD_GRADIENTS, ids=BAD_IDS)
def test_a_bad_gradient_changes_no_tensor_of_any_group(
    spoil: Callable[[Parameter], None], error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    emb, weight, bad, fresh = table(4, 2), table(4, 2), table(4, 2), table(4, 2)
    groups = [
        {"params": [("emb", emb), ("weight", weight)]},
        {"params": [("fresh", fresh), ("bad", bad)], "weight_decay": 0.1},
    ]
    optimizer = SparseAdam(groups, **options)  # type: ignore[arg-type]
    emb.grad, weight.grad, bad.grad = rows_of(emb, [1, 2]), torch.ones(4, 2), rows_of(bad, [0, 3])
    optimizer.step()
    fresh.grad = rows_of(fresh, [1])
    spoil(bad)
    before = Snapshot(optimizer)
    with pytest.raises(error, match=message) as caught:
        optimizer.step()
    assert str(caught.value).startswith("parameter 1 of group 1 ('bad'): ")
    before.assert_unchanged()
    bad.grad = None
    optimizer.step()
    assert optimizer.state[emb]["step"] == 2


@pytest.mark.usefixtures("backend")
def test_an_index_in_a_table_without_rows() -> None:
    param = table(0, 2)
    optimizer = SparseAdam([param])
    param.grad = sparse([[0]], torch.ones(1, 2), (0, 2), checked=False)
    with pytest.raises(IndexError, match=r"parameter 0 of group 0: .*index 0 .*expected 0 <= index < 0"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.usefixtures("backend")
def test_a_state_on_another_device() -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param])
    param.grad = rows_of(param, [1])
    optimizer.step()
    optimizer.state[param]["exp_avg_sq"] = torch.empty(4, 2, device="meta")
    before = param.detach().clone()
    with pytest.raises(
        ValueError,
        match=r"parameter 0 of group 0: .*'exp_avg_sq' is .*on meta; expected .*the parameter, which is .*on cpu",
    ):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 1


@pytest.mark.usefixtures("backend")
def test_an_index_outside_a_table_without_columns() -> None:
    param = table(4, 0)
    param.grad = sparse([[7]], torch.ones(1, 0), (4, 0), checked=False)
    with pytest.raises(IndexError, match=r"index 7 .*expected 0 <= index < 4"):
        SparseAdam([param]).step()


@pytest.mark.usefixtures("backend")
def test_rows_that_run_over_other_dimensions_than_those_counted() -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param], bias_correction="row")
    param.grad = entries_of(param, 3, sparse_dim=1)
    optimizer.step()
    param.grad = entries_of(param, 3, sparse_dim=2)
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: .*\(4, 2\).*\(4,\)"):
        optimizer.step()
    before.assert_unchanged()


@pytest.mark.parametrize("change", ["lr", "betas", "eps"])
def test_an_unknown_keyword_is_refused(change: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        SparseAdam([table(2, 2)], **{change + "s": 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [0, 2])
def test_a_state_dict_of_another_number_of_groups(groups: int) -> None:
    optimizer = SparseAdam([table(2, 2)])
    saved = optimizer.state_dict()
    saved["param_groups"] = [{**saved["param_groups"][0], "params": [g]} for g in range(groups)]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(saved)
