"""What `rowstep inspect` prints: a table per optimizer, the weights without state, histograms and totals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rowstep.cli._inspect import text
from rowstep.cli._inspect.contents import Contents, Optimizer
from rowstep.cli._inspect.figures import Histogram
from rowstep.cli._inspect.histograms import Histograms
from rowstep.cli._inspect.parameters import Parameter, Parameters
from rowstep.cli._inspect.stored import Stored

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MOST_LINES = 1000
_BAR = 40

TOUCHED = (
    "rows touched: rows whose row_step is above 0, or, where rows are not counted, rows whose second moment is not zero"
)
NORMS = "Euclidean norm of each row of the {}"
AGES = "steps each row has taken (row_step); a state without row_step does not tell"


def parts(contents: Contents, parameters: Parameters, drawn: Histograms, console: Console) -> Iterator[RenderableType]:
    """Everything, from top to bottom. Words from the file are Text, in which rich sees no markup."""
    yield Text(f"{contents.kind}, {text.size(contents.size)}")
    for optimizer, members in zip(contents.optimizers, parameters.of_optimizers, strict=True):
        yield Text(_title(optimizer))
        for number, group in enumerate(optimizer.groups[:MOST_LINES]):
            yield Text(f"  group {number}: {_options(group)}")
        yield _table(members, TOUCHED)
    if parameters.without_state:
        yield Text("Weights without optimizer state" if contents.optimizers else "Weights")
        yield _table(parameters.without_state, None)
    bar = "#" if console.options.ascii_only else "█"
    for pair in drawn.shown:
        for caption, histogram in ((NORMS.format(pair.norms_of), pair.norms), (AGES, pair.ages)):
            if histogram is not None:
                yield Text(f"\n{text.printable(pair.name)}: {caption}")
                yield _bars(histogram, bar)
    if drawn.left_out:
        yield Text(
            f"Histograms are of the {len(drawn.shown)} tables with the most rows; {drawn.left_out} more have none."
        )
    yield Text(f"\n{_totals(parameters)}")


def _title(optimizer: Optimizer) -> str:
    where = f" at {text.printable(optimizer.where)}" if optimizer.where else ""
    return f"Optimizer state{where}, {text.count(len(optimizer.states), 'parameter')} with state; options that are on:"


def _options(group: Mapping[Any, Any]) -> str:
    """The options that are not off. Those that only say how torch loops over parameters are rarely on."""
    shown = [
        f"{text.value(key)}={text.value(value)}"
        for key, value in group.items()
        if key not in ("params", "param_names") and value is not None and value is not False
    ]
    return ", ".join(shown[:50]) or "no options"


def _table(parameters: list[Parameter], caption: str | None) -> Table:
    table = Table(caption=caption, caption_justify="left", show_lines=any(len(p.slots) > 1 for p in parameters))
    table.add_column("parameter", overflow="fold", max_width=28)
    table.add_column("shape", overflow="fold")
    table.add_column("dtype")
    table.add_column("weights", justify="right")
    if caption is not None:
        table.add_column("state", overflow="fold")
        for heading in ("steps", "rows touched", "state bytes\nper weight"):
            table.add_column(heading, justify="right", overflow="fold")
    for parameter in parameters[:MOST_LINES]:
        cells = [*_weights(parameter), *(_state(parameter) if caption is not None else ())]
        table.add_row(*map(Text, cells))
    if len(parameters) > MOST_LINES:
        table.add_row(f"and {len(parameters) - MOST_LINES:,} more")
    return table


def _weights(parameter: Parameter) -> tuple[str, str, str, str]:
    name = text.printable(parameter.name) + ("\n(by shape)" if parameter.is_named_by_shape else "")
    shape = text.shape(parameter.shape) if parameter.shape is not None else "unknown"
    stored = parameter.weights
    if stored is None:
        return name, shape, "", "not in file"
    size = text.size(stored.nbytes) if stored.flaw is None else f"{text.size(stored.nbytes)}\n({stored.flaw})"
    return name, shape, text.dtype(stored.dtype), size


def _state(parameter: Parameter) -> tuple[str, str, str, str]:
    slots = "\n".join(_slot(name, slot) for name, slot in list(parameter.slots.items())[:50]) or "none"
    steps = f"{parameter.steps:,.15g}" if parameter.steps is not None else ""
    touched = "{:,} of {:,}".format(*parameter.touched) if parameter.touched is not None else ""
    count = parameter.weight_count
    return slots, steps, touched, f"{parameter.state_bytes / count:.2f}" if count else ""


def _slot(name: str, slot: object) -> str:
    name = text.printable(name)
    if not isinstance(slot, Stored):
        return f"{name}  {text.value(slot)}"
    flaw = f" ({slot.flaw})" if slot.flaw is not None else ""
    return f"{name}  {text.dtype(slot.dtype)}  {text.shape(slot.shape)}  {text.size(slot.nbytes)}{flaw}"


def _bars(histogram: Histogram, bar: str) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(justify="right")
    table.add_column(min_width=_BAR)
    table.add_column(justify="right")
    largest = max([*histogram.counts, 1])
    for label, count in zip(labels(histogram), histogram.counts, strict=True):
        length = -(-count * _BAR // largest)  # rounded up, so that a single row is seen
        table.add_row(label, bar * length, f"{count:,}")
    for label, count in (("0", histogram.not_positive), ("NaN or inf", histogram.not_finite)):
        if count:
            table.add_row(label, "", f"{count:,}")
    return table


def labels(histogram: Histogram) -> list[str]:
    """The range of each bin; of whole numbers the first and the last."""
    found = []
    for low, high in itertools.pairwise(histogram.edges):
        first, last = (
            (f"{low + 0.5:,.0f}", f"{high - 0.5:,.0f}") if histogram.is_whole else (f"{low:.4g}", f"{high:.4g}")
        )
        found.append(first if first == last else f"{first} to {last}")
    return found


def _totals(parameters: Parameters) -> str:
    members = parameters.all
    weights = [parameter.weights for parameter in members if parameter.weights is not None]
    distinct = {id(stored): stored for stored in weights}.values()
    state = sum(parameter.state_bytes for parameter in members)
    stepped = [parameter for group in parameters.of_optimizers for parameter in group if parameter.tensors]
    line = f"Total: {text.count(len(members), 'parameter')}; weights in the file: "
    numbers = sum(stored.numel for stored in distinct if stored.flaw is None)
    line += f"{numbers:,} in {text.size(sum(stored.nbytes for stored in distinct))}"
    if parameters.of_optimizers:
        line += f"; state: {text.size(state)}"
        counts = [parameter.weight_count for parameter in stepped]
        known = [count for count in counts if count is not None]
        if sum(known) and len(known) == len(counts):
            line += f", {state / sum(known):.2f} bytes per weight that has state"
    return line
