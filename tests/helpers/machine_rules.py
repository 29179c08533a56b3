"""What real programs do to tables in training, as rules of a run: groups, rows, copies, dtypes and mistakes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.helpers.copies import pickled, through_a_file
from tests.helpers.gradients import sparse
from tests.helpers.machine import BF16, F32, F64, Machine, Side, random_weights, seeds
from tests.helpers.random_gradients import Dice, Gradient, Sketch, all_dice

which = st.integers(0, 1)
row_lists = st.lists(st.integers(0, 23), max_size=4)


class Program(Machine):
    """A run with every rule but the steps themselves."""

    # Groups

    @precondition(lambda self: len(self.models) < 2)
    @rule(dice=all_dice)
    def add_a_table(self, dice: Dice) -> None:
        self.draw_table(dice)
        index = len(self.models) - 1
        self.each(lambda side: self.add_a_table_to(side, index))

    def add_a_table_to(self, side: Side, index: int) -> None:
        side.optimizer.add_param_group({"params": [side.param(index)], **self.group(index)})

    def change_options(self, number: int, **changes: Any) -> None:
        index = self.index(number)
        self.models[index].options = self.models[index].options | changes
        self.each(lambda side: side.optimizer.param_groups[index].update(changes))

    @rule(number=which, dice=all_dice)
    def change_a_number(self, number: int, dice: Dice) -> None:
        name = dice.choice(["lr", "eps", "betas"])
        self.change_options(number, **{name: dice.choice(self.numbers()[name])})

    @rule(number=which, dice=all_dice)
    def switch_options(self, number: int, dice: Dice) -> None:
        model = self.models[self.index(number)]
        names = [name for name in self.option_sets if self.can_compile(name, model.dtype, model.state_dtype)]
        self.names[self.index(number)] = name = dice.choice(names)
        self.change_options(number, **(self.defaults | self.option_sets[name]))

    # Rows

    @rule(number=which, count=st.integers(0, 3), seed=seeds, as_function=st.booleans())
    def grow(self, number: int, count: int, seed: int, as_function: bool) -> None:
        index = self.index(number)
        model = self.models[index]
        count = min(count, 9 - model.shape[0])
        new = random_weights((count, *model.shape[1:]), seed, model.dtype)
        init = (lambda rows: rows.copy_(new)) if as_function else new
        model.grow(new)
        self.each(lambda side: side.optimizer.grow(side.param(index), count, init))

    @rule(number=which, dice=all_dice, as_mask=st.booleans())
    def keep_rows(self, number: int, dice: Dice, as_mask: bool) -> None:
        index = self.index(number)
        mask = torch.tensor([dice.below(4) > 0 for _ in range(self.models[index].shape[0])], dtype=torch.bool)
        rows = mask.nonzero().view(-1)
        named = mask if as_mask else rows.flip(0)
        self.models[index].keep((rows if as_mask else rows.flip(0)).tolist())
        self.each(lambda side: side.optimizer.keep_rows(side.param(index), named))

    @rule(number=which, seed=seeds)
    def permute_rows(self, number: int, seed: int) -> None:
        index = self.index(number)
        order = torch.randperm(self.models[index].shape[0], generator=torch.Generator().manual_seed(seed))
        self.models[index].keep(order.tolist())
        self.each(lambda side: side.optimizer.permute_rows(side.param(index), order))

    @rule(number=which, ids=row_lists)
    def reset_rows(self, number: int, ids: list[int]) -> None:
        index = self.index(number)
        count = self.models[index].shape[0]
        rows = sorted({i % count for i in ids}) if count else []
        self.models[index].reset(rows)
        self.each(lambda side: side.optimizer.reset_rows(side.param(index), torch.tensor(rows, dtype=torch.int64)))

    # Copies, files, dtypes

    @rule(how=st.sampled_from([copy.deepcopy, pickled]))
    def copy_everything(self, how: Callable[[Any], Any]) -> None:
        def copy_side(side: Side) -> None:
            side.module, side.optimizer = how((side.module, side.optimizer))

        self.copied()
        self.each(copy_side)

    def can_load(self) -> bool:
        return self.can_all_compile(lambda model: (model.dtype, model.dtype))

    @precondition(can_load)
    @rule(renewed=st.booleans(), in_a_file=st.booleans())
    def reload(self, renewed: bool, in_a_file: bool) -> None:
        def reload_side(side: Side) -> None:
            saved = side.optimizer.state_dict()
            saved = through_a_file(saved) if in_a_file else copy.deepcopy(saved)
            if renewed:
                self.renew(side)
            side.optimizer.load_state_dict(saved)

        self.loaded(renewed)
        self.each(reload_side)

    def visit(self, torchs: Any, side: Side, gradients: dict[int, Gradient]) -> None:
        """Go on in a class of torch, perhaps take a step there, and come back."""
        visited = torchs([{"params": [side.param(i)]} for i in range(len(self.models))])
        visited.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
        side.give(gradients)
        visited.step()
        self.renew(side)
        side.optimizer.load_state_dict(copy.deepcopy(visited.state_dict()))

    def copied(self) -> None:
        """Tell the models that everything was copied."""

    def moved(self, index: int) -> None:
        """Tell the model of a table that its module goes to another dtype."""

    def loaded(self, renewed: bool) -> None:
        """Tell the models that a state was loaded, perhaps by a new optimizer."""
        for model in self.models:
            model.load()

    @rule(number=which, dice=all_dice)
    def change_dtype(self, number: int, dice: Dice) -> None:
        index = self.index(number)
        name, model = self.names[index], self.models[index]
        others = (F64, F32, BF16)
        found = {dtype: model.state_dtype if model.has_state else dtype for dtype in others}
        dtype = dice.choice([dtype for dtype in others if self.can_compile(name, dtype, found[dtype])])
        self.moved(index)
        self.each(lambda side: side.module[index].to(dtype))
        model.slots["p"].cast(dtype)

    # Mistakes. Others have tests of their own: they raise whatever has happened before.

    @rule(number=which, index=st.sampled_from([-1, -(2**40), 9, 2**40]))
    def name_a_row_that_is_not_there(self, number: int, index: int) -> None:
        """In one table, while the others have gradients that are right."""
        at = self.index(number)
        shape, counts = self.models[at].shape, self.models[at].row_steps
        if counts is not None and counts.shape != shape[:1]:
            return  # rows of another kind are counted: that is found first

        def attempt(side: Side) -> None:
            good = {}
            for i, model in enumerate(self.models):
                layout = "dense" if model.dtype == model.state_dtype else "uncoalesced"
                good[i] = Sketch(layout, 1, [], "ordinary", i).for_table(model.shape, model.dtype)
            side.give(good)
            values = torch.ones(1, *shape[1:], dtype=self.models[at].dtype)
            side.param(at).grad = sparse([[index]], values, shape, checked=False)
            side.optimizer.step()

        self.settle()
        self.each_refuses(IndexError, attempt)

    def settle(self) -> None:
        """What an optimizer may do before it refuses a step: bring rows up to date."""
