"""What the options of a group come to: what is kept, the numbers of a step, and what a kernel is made for.

A ``Rule`` is made anew when an option's object has changed. To add an option: say in ``_options`` what it may be, and
here what it comes to. One that keeps state has a slot in ``_state``; one that changes the equations is also in
``_rules/adam``, in the reference that calls it, and in ``_kernels/rows`` and its ``Kind``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch

from ._rules import adam
from ._rules.rounding import step_key
from ._state import StateSpec

# As ``_kernels/job`` has them at the end of a job: the key of random rounding, and scalars.
_WORDS = struct.Struct("=q7d")


class Step:
    """What a step of a table takes besides tensors."""

    __slots__ = ("_numbers", "as_dense", "count", "key", "rule", "words")

    def __init__(self, rule: Rule, count: int, as_dense: bool) -> None:
        self.rule, self.count = rule, count
        """How many steps the table has taken, with this one."""
        self.as_dense = as_dense
        """By torch.optim.Adam's rule instead of torch.optim.SparseAdam's; they differ in where eps goes."""
        self._numbers = beta1, beta2, eps, step_size, shrink, decay = adam.scalars(
            rule.lr, rule.betas, rule.eps, count, rule.weight_decay, rule.is_decoupled, rule.spec.is_counted, as_dense
        )
        self.key = step_key(rule.seed, count) if rule.rounds else 0
        shrink, sign = 1.0 if shrink is None else shrink, -1.0 if rule.maximize else 1.0
        self.words = _WORDS.pack(self.key, beta1, beta2, eps, step_size, shrink, decay or 0.0, sign)

    @property
    def scalars(self) -> adam.Scalars:
        """The numbers of the step, by name."""
        return adam.Scalars(*self._numbers)


_FIXED = frozenset([bool, float, int, str, tuple, torch.dtype, type(None)])


class Rule:
    """The options of a group, read once."""

    def __init__(self, group: Mapping[str, Any], options: Any) -> None:
        beta1, beta2 = group["betas"]
        self.options = options
        """All but the lr, which may be another at every step."""
        self.is_fixed = all(type(value) in _FIXED for value in (*options, beta1, beta2))
        """Whether none of them, a list or a Tensor, can change in place."""
        # torch takes Tensors of one number too. And kernels are compiled for floats.
        self.betas, self.eps = (float(beta1), float(beta2)), float(group["eps"])
        self.weight_decay, self.is_decoupled = float(group["weight_decay"]), bool(group["decoupled_weight_decay"])
        self.maximize, self.amsgrad, self.seed = bool(group["maximize"]), bool(group["amsgrad"]), group["seed"]
        self.skips_nonfinite = group.get("nonfinite") == "skip"
        self.forces_sparse = bool(group.get("force_sparse"))
        self.rounds_weights = bool(group["stochastic_rounding"])
        self.spec, self.dense_spec = StateSpec.under(group), StateSpec.under(group, in_a_table=False)
        """What is kept for a table, and for a parameter with dense gradients."""
        self.rounds = self.spec.is_rounded or self.rounds_weights
        self.adds_decay = self.weight_decay != 0 and not self.is_decoupled
        """Whether weight decay goes into the gradient."""
        self.waiting_options = (
            self.betas, self.eps, self.amsgrad, self.adds_decay, self.spec, self.rounds_weights, self.seed,
        )  # fmt: skip
        """What the path of a row that waits depends on, besides lr and decoupled weight decay."""
        self.lr: Any = None
        self._last: Step | None = None

    def rounds_weights_of(self, dtype: Any) -> bool:
        """Whether weights of this dtype are rounded at random."""
        return self.rounds_weights and dtype.itemsize == 2

    def set_rate(self, lr: Any) -> None:
        """Take steps with this lr from now on."""
        self.lr, self._last = lr, None

    def step(self, count: int, as_dense: bool) -> Step:
        """The ``count``-th step of a table: the same object for tables that take it one after the other."""
        step = self._last
        if step is None or step.count != count or step.as_dense is not as_dense:
            step = self._last = Step(self, count, as_dense)
        return step
