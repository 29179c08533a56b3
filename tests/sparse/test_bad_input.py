"""Bad input raises a sentence that says what is wrong where, and no tensor has changed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, set_grad, sparse, table

NAN, INF = math.nan, math.inf

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, r"Invalid learning rate: -1.0.*expected .*0"),
    ({"lr": NAN}, r"Invalid learning rate: nan.*expected"),
    ({"lr": torch.tensor([0.1, 0.2])}, r"Tensor lr must be 1-element"),
    ({"eps": 0.0}, r"Invalid epsilon value: 0.0.*expected .*> 0"),
    ({"eps": NAN}, r"Invalid epsilon value: nan.*expected .*> 0"),
    ({"betas": (1.0, 0.999)}, r"Invalid beta parameter at index 0: 1.0.*expected .*\[0, 1\)"),
    ({"betas": (0.9, 1.5)}, r"Invalid beta parameter at index 1: 1.5.*expected .*\[0, 1\)"),
    ({"betas": (0.9,)}, r"Invalid betas: \(0.9,\).*expected two numbers"),
    ({"weight_decay": -0.1}, r"Invalid weight_decay value: -0.1.*expected .*>= 0"),
    ({"weight_decay": INF}, r"Invalid weight_decay value: inf.*expected .*>= 0"),
    ({"bias_correction": "rows"}, r"Invalid bias_correction: 'rows'.*expected 'global' or 'row'"),
    ({"nonfinite": "ignore"}, r"Invalid nonfinite: 'ignore'.*expected 'propagate' or 'skip'"),
    ({"amsgrad": "yes"}, r"Invalid amsgrad: 'yes'.*expected False or True"),
    ({"lr": "1e-3"}, r"Invalid learning rate: '1e-3' \(a str\)( in group 1)?; expected a finite number"),
    ({"eps": "1e-8"}, r"Invalid epsilon value: '1e-8' \(a str\)"),
    ({"betas": "0.9, 0.999"}, r"Invalid betas: '0.9, 0.999' \(a str\)"),
    ({"betas": ("0.9", 0.999)}, r"Invalid beta parameter at index 0: '0.9' \(a str\)"),
    ({"weight_decay": "0"}, r"Invalid weight_decay value: '0' \(a str\)"),
    ({"maximize": "False"}, r"Invalid maximize: 'False' \(a str\)"),
    ({"state_dtype": "bfloat16"}, r"Invalid state_dtype: 'bfloat16' \(a str\).*expected None or torch.bfloat16"),
    ({"seed": "0"}, r"Invalid seed: '0' \(a str\)"),
    ({"decoupled_weight_decay": None}, r"Invalid decoupled_weight_decay: None.*expected False or True"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
def test_an_option_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAdam([table(2, 2)], **options)
    with pytest.raises(ValueError, match=message) as caught:
        SparseAdam([{"params": [table(2, 2)]}, {"params": [table(2, 2)], **options}])
    assert "in group 1" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_and_complex_parameters_are_refused_with_their_positions() -> None:
    sparse_ones = table(2, 2).detach().to_sparse(), torch.ones(2, 2).to_sparse_csr()
    complex_one = Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=re.escape("Sparse params at indices [[0, 1], [1, 0]]: SparseAdam requires")):
        SparseAdam([{"params": [complex_one, sparse_ones[0]]}, {"params": [sparse_ones[1]]}])
    with pytest.raises(ValueError, match=re.escape("Complex params at indices [[1, 1]]: SparseAdam does not support")):
        SparseAdam([{"params": [table(1)]}, {"params": [table(2, 2), complex_one]}])
    optimizer = SparseAdam([table(2, 2)])
    with pytest.raises(ValueError, match=re.escape("params at indices [[1, 1]]")):
        optimizer.add_param_group({"params": [table(2, 2), complex_one]})
    assert len(optimizer.param_groups) == 1


def test_what_torch_refuses_is_refused() -> None:
    param = table(2, 2)
    with pytest.raises(ValueError, match=r"Invalid learning rate: 0\.0.*expected .*> 0"):
        SparseAdam([param], lr=0.0)  # but a group may have it, for a warm-up
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        SparseAdam(param)


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


def state_of_another_shape(param: Parameter) -> None:
    param.data = torch.ones(5, 2)
    param.grad = rows_of(param, [0, 4])


BAD_GRADIENTS: list[tuple[Callable[[Parameter], None], type[Exception], str]] = [
    (outside(4), IndexError, r"index 4 .*expected 0 <= index < 4"),
    (outside(-1), IndexError, r"index -1 .*expected 0 <= index < 4"),
    (outside(2**62), IndexError, rf"index {2**62} .*expected 0 <= index < 4"),
    (outside(-1, dense_dim=0), IndexError, r"index -1 in dimension 1.*expected 0 <= index < 2"),
    (wrong_shape, ValueError, r"shape \(4, 2\).*expected .*\(3, 2\)"),
    (wrong_dense_shape, ValueError, r"shape \(4, 2\).*expected .*\(8,\)"),
    (wrong_dtype, TypeError, r"dtype torch.int64.*expected a 16-, 32- or 64-bit floating-point dtype"),
    (state_of_another_shape, ValueError, r"'exp_avg' is \(4, 2\).*expected shape \(5, 2\)"),
]
BAD_IDS = ["4", "-1", "2**62", "column -1", *(spoil.__name__ for spoil, _, _ in BAD_GRADIENTS[4:])]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip", "bias_correction": "row"}], ids=str)
@pytest.mark.parametrize(("spoil", "error", "message"), BAD_GRADIENTS, ids=BAD_IDS)
def test_a_bad_gradient_changes_no_tensor_of_any_group(
    spoil: Callable[[Parameter], None], error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    emb, weight, bad, fresh = table(4, 2), table(4, 2), table(4, 2), table(4, 2)
    groups = [
        {"params": [("emb", emb), ("weight", weight)]},
        {"params": [("fresh", fresh), ("bad", bad)], "amsgrad": True},
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


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("optimizer", [SparseAdam, DeferredAdam])
def test_a_parameter_on_the_meta_device(optimizer: Any, is_sparse: bool) -> None:
    param = Parameter(torch.empty(4, 2, device="meta"))
    made = optimizer([("emb", param)])
    param.grad = torch.ones_like(param)
    if is_sparse:
        param.grad = sparse(torch.empty(1, 2, dtype=torch.int64, device="meta"), param.grad[:2], (4, 2), checked=False)
    with pytest.raises(
        ValueError, match=r"^parameter 0 of group 0 \('emb'\): the parameter is on the meta device.*expec"
    ):
        made.step()
    assert not made.state


def test_a_model_that_was_converted_says_how_to_convert_the_state() -> None:
    params = [table(4, 2), table(3, 2)]
    made = DeferredAdam(params)
    params[0].grad, params[1].grad = rows_of(params[0], [1]), torch.ones(3, 2)
    made.step()
    for param in params:
        param.data, param.grad = param.data.double(), None
    params[1].grad = torch.ones(3, 2, dtype=torch.float64)
    with pytest.raises(
        TypeError, match=r"expected torch.float32, .* its state. .*opt.load_state_dict\(opt.state_dict\("
    ):
        made.step()
    made.load_state_dict(made.state_dict())
    made.step()
    assert made.state[params[1]]["exp_avg"].dtype == torch.float64
    set_grad(params[1], torch.ones(3, 2))
    with pytest.raises(TypeError, match=r"dtype torch.float32; expected torch.float64.*Convert the gradient"):
        made.step()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("shape", "index"), [((0, 2), 0), ((4, 0), 7)], ids=["no rows", "no columns"])
def test_an_index_outside_a_table_without_elements(shape: tuple[int, int], index: int) -> None:
    param = table(*shape)
    optimizer = SparseAdam([param])
    param.grad = sparse([[index]], torch.ones(1, shape[1]), shape, checked=False)
    with pytest.raises(IndexError, match=rf"index {index} .*expected 0 <= index < {shape[0]}"):
        optimizer.step()
    assert not optimizer.state
