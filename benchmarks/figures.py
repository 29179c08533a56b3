"""What the pages can ask for: tables, figures in prose and pictures, by name, from the run of each suite.

A range is over every case measured and every number of threads, the worst one included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import memory, quality, rows
from benchmarks.cases import LONG, short
from benchmarks.contenders import ADAM, ROWSTEP, TORCH
from benchmarks.deferred import DEFERRED, SPARSE
from benchmarks.distributed.training import SHARDED, TORCH_DDP, WAYS
from benchmarks.pages import RESULTS
from benchmarks.peers import plot, report
from benchmarks.peers.catalogue import FBGEMM_LOOP, ROWSTEP_LOOP
from benchmarks.quality import planted, ranking
from benchmarks.quality.lazy import findings
from benchmarks.quality.lazy import plot as lazy_plot
from benchmarks.quality.tuning import Entry
from benchmarks.report import Grid, milliseconds, multiple
from benchmarks.timing import Measurement

Runs = Mapping[str, Any]

# torch's SparseAdam and ours, as suites call them.
SPARSE_ADAMS = ((TORCH, ROWSTEP), (TORCH, SPARSE), ("EmbeddingBag, torch SparseAdam", "EmbeddingBag, rowstep"))
WAITING = ((ADAM, DEFERRED),)
KINDS = {"step": "step", "loop": "whole loop"}
# Of GitHub's dark pages. The background is filled: readers of the site may have chosen its light look on a dark system.
LIGHT_ON_DARK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
DARK: Any = dict.fromkeys(LIGHT_ON_DARK, "#e6edf3") | dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#0d1117")


def measured(runs: Runs, *suites: str) -> list[Measurement]:
    return [Measurement.from_json(each) for suite in suites for each in runs[suite]["measurements"]]


def ratios(of: Iterable[Measurement], kind: str, pairs: Iterable[tuple[str, str]]) -> list[float]:
    """How many times longer the first of a pair takes; curves of the suite `peers` are of steps."""
    wanted = [each for each in of if (each.kind == "loop") == (kind == "loop")]
    found = (each.ratio(*pair) for each in wanted for pair in pairs)
    return [ratio for ratio in found if ratio is not None]


def span(values: Sequence[float]) -> str:
    low, high = (_two(end) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _two(value: float) -> str:
    """Two digits that count, or all before the point."""
    return f"{value:,.{max(0, 1 - math.floor(math.log10(value)))}f}"


# Figures in prose


def numbers(runs: Runs) -> dict[str, str]:
    found: dict[str, str] = {}
    everywhere = measured(runs, "sparse", "deferred", "rows", "peers")
    largest = [each for each in measured(runs, "deferred", "rows") if each.about.startswith(LONG.size)]
    memory_steps = [each for each in measured(runs, "memory") if each.kind == "step"]
    for kind in KINDS:
        found[f"sparse.{kind}"] = span(ratios(everywhere, kind, SPARSE_ADAMS))
        found[f"deferred.{kind}.over-sparse"] = span(
            ratios(everywhere, kind, ((DEFERRED, ROWSTEP), (DEFERRED, SPARSE)))
        )
        found[f"deferred.{kind}.beside-torch"] = span(ratios(everywhere, kind, ((TORCH, DEFERRED),)))
        found[f"dense.{kind}.10M"] = span(ratios(largest, kind, WAITING))
        found[f"distributed.{kind}"] = span(ratios(measured(runs, "distributed"), kind, ((TORCH_DDP, SHARDED),)))
    for key, name in (("row", "row"), ("row-no-first", "row, no first")):
        found[f"memory.{key}"] = span(ratios(memory_steps, "step", ((name, memory.FLOAT32),)))
    found["peers.fbgemm"] = span(ratios(everywhere, "loop", ((FBGEMM_LOOP.name, ROWSTEP_LOOP.name),)))
    found["peers.8-bit"] = span(ratios(everywhere, "step", (("bitsandbytes Adam8bit", SPARSE),)))
    flushes = [each for each in measured(runs, "deferred") if each.kind == "flush"]
    found["flush"] = span(ratios(flushes, "step", ((DEFERRED, ADAM),)))
    found |= {f"first-step.{kind}": _two(runs["sparse"]["first_step_seconds"][kind]) for kind in ("cold", "cached")}
    peaks = runs["sparse"]["peak_memory_bytes_per_id"]
    found |= {f"peak.{who}": f"{max(peak[who] for peak in peaks):,.0f}" for who in ("rowstep", "torch")}
    smallest, large, small = pays(measured(runs, "rows"))
    return found | {"pays.from": short(smallest), "pays.large": span(large), "pays.small": span(small or large)}


def pays(of: Sequence[Measurement]) -> tuple[int, list[float], list[float]]:
    """The rows from which on DeferredAdam's loop is no slower at any share; by how much, from there on and below."""
    found: dict[int, list[float]] = {count: [] for count in rows.COUNTS}
    for each in of:
        if each.kind == "loop of a share":
            found[int(each.name.split()[-1])] += ratios([each], "step", WAITING)
    fast = [count for count in found if min(min(found[more]) for more in found if more >= count) >= 1]
    smallest = min(fast, default=max(found))
    large, small = (
        [ratio for count in found if (count >= smallest) is is_large for ratio in found[count]]
        for is_large in (True, False)
    )
    return smallest, large, small


# Tables


def tables(runs: Runs) -> dict[str, str]:
    made = {f"peers.{name}": block for name, block in report.blocks(runs["peers"]).items()}
    of_lazy = [findings.Finding.from_json(problem) for problem in runs["lazy"]["problems"]]
    made |= {f"lazy.{name}": grid.markdown() for name, grid in findings.grids(of_lazy)}
    made |= {f"{suite}.machine": "\n".join(report.sentences(run, measured(runs, suite))) for suite, run in runs.items()}
    names = {ROWSTEP: "rowstep", TORCH: "torch SparseAdam"}
    demo = (RESULTS / "demo.txt").read_text().replace("\n\n\n", "\n\n")  # its progress, between these, is not kept
    made["demo"] = f"```text\n{demo}```"
    made["sparse.times"] = both(measured(runs, "sparse"), names, (TORCH, ROWSTEP))
    names = {DEFERRED: "`DeferredAdam`", ADAM: "dense Adam"}
    made["deferred.dense"] = both(measured(runs, "deferred"), names, (ADAM, DEFERRED))
    made["rows.shares"] = _shares(measured(runs, "rows"))
    made["distributed.times"] = _by_way(measured(runs, "distributed"))
    made["host.prefetch"] = _prefetched(runs["host"]["prefetch"])
    made["memory.kinds"] = _kinds(runs)
    made["memory.models"] = _models(runs["memory"]["models"])
    return made


def both(of: Sequence[Measurement], names: Mapping[str, str], ratio: tuple[str, str]) -> str:
    """Median milliseconds, a line for every case and number of threads: of the step, then of the whole loop."""
    found = {(each.name, each.threads, each.kind): each for each in of if each.ratio(*ratio) is not None}
    lines, before = [], ""
    for name, count in dict.fromkeys((name, count) for name, count, kind in found if kind in KINDS):
        both_kinds = [found[name, count, kind] for kind in KINDS]
        line = [both_kinds[0].about if name != before else "", str(count)]
        for each in both_kinds:
            line += [milliseconds(each.timings[who].median) if who in each.timings else "" for who in names]
            line.append(multiple(each.ratio(*ratio) or 0) + " *" * each.disturbed)
        lines.append(line)
        before = name
    over = " / ".join(names[name] for name in ratio)
    headings = [
        heading for label in KINDS.values() for heading in (*(f"{label}: {who}" for who in names.values()), over)
    ]
    return Grid("", ["case", "threads", *headings], lines, words=2).markdown()


def _by_way(of: Sequence[Measurement]) -> str:
    """Median milliseconds of a step or loop, a column for every way to train."""
    lines = [
        [each.about + " *" * each.disturbed, str(each.threads), KINDS[each.kind]]
        + [milliseconds(each.timings[way].median) if way in each.timings else "" for way in WAYS]
        for each in of
        if each.kind in KINDS
    ]
    return Grid("", ["case", "threads", "ms of", *WAYS], lines, words=3).markdown()


def _shares(of: Sequence[Measurement]) -> str:
    """Dense Adam's time over DeferredAdam's, on the fewest threads: lines by rows of the table, columns by share."""
    threads = min(each.threads for each in of)
    found = {(each.kind, each.name): each.ratio(*WAITING[0]) or 0 for each in of if each.threads == threads}
    lines = [
        [short(shares[0].rows) if not number else "", label]
        + [multiple(found[f"{kind} of a share", case.name]) for case in shares]
        for shares in rows.FULL_SHARES
        for number, (kind, label) in enumerate(KINDS.items())
    ]
    shares = [f"{share:.1%}".replace(".0%", "%") for share in rows.SHARES]
    return Grid("", ["rows", "", *shares], lines, words=2).markdown()


def _prefetched(found: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> str:
    lines = [
        [about, f"{taken[1] * 1e3:.1f}", f"{taken[3] * 1e3:.1f}", f"{hidden[1]:.0%}"] for about, taken, hidden in found
    ]
    return Grid("", ["table and state", "row time, ms", "prefetched, ms", "hidden"], lines).markdown()


KEPT = {
    "SparseAdam": ("Adam's, `SparseAdam`", memory.FLOAT32),
    "DeferredAdam": ("Adam's, `DeferredAdam`", ""),
    "bfloat16": ("`state_dtype=torch.bfloat16`", "bfloat16"),
    "row": ('`second_moment="row"`', "row"),
    "bfloat16 + row": ("both", "bfloat16 and row"),
    "row, β₁ = 0": ('`"row"`, `betas=(0, β₂)`', "row, no first"),
    "row-wise Adagrad": ("row-wise Adagrad, for comparison", ""),
}
"""What tables keep, by rule of the suite `quality`: what the page calls it, and the suite `memory`."""


def _models(lines: Sequence[Sequence[str]]) -> str:
    """GB of weights and of each kind of state: a line for each model."""
    sizes: dict[str, dict[str, str]] = {}
    for model, state, _threads, weights, of_state, _rate in lines:
        sizes.setdefault(model, {"weights": weights})[state] = of_state
    heading = ["model", *next(iter(sizes.values()))]
    return Grid("", heading, [[model, *of_model.values()] for model, of_model in sizes.items()]).markdown()


def _kinds(runs: Runs) -> str:
    """Bytes and times of the suite `memory`, beside what the suite `quality` learned with each."""
    steps = [each for each in measured(runs, "memory") if (each.kind, each.threads) == ("step", 1)]
    on_movies, on_planted = (
        {entry.name: entry.figures for entry in map(Entry.from_json, runs["quality"][part])}
        for part in ("movielens", "planted")
    )
    lines = []
    for name, (label, kind) in KEPT.items():
        kept = f"{runs['memory']['state_bytes_per_weight'][kind]:.2f}" if kind else ""
        taken = [f"{each.ratio(kind, memory.FLOAT32) or 0:.2f}" if kind else "" for each in steps]
        errors = [f"{on_planted[name][part].mean:#.3g}" for part in (planted.HEAD, planted.TAIL)]
        lines.append([label, kept, *taken, on_movies[name][ranking.NDCG].spread, *errors])
    headings = ["tables keep", "bytes per weight", *(f"step, {each.about}" for each in steps)]
    return Grid("", [*headings, "NDCG@10", "error of head", "of tail"], lines).markdown()


# Pictures


def draw(runs: Runs, folder: Path) -> None:
    of_peers = measured(runs, "peers")
    of_lazy = [findings.Finding.from_json(problem) for problem in runs["lazy"]["problems"]]
    of_states = ([Entry.from_json(entry) for entry in runs["quality"][part]] for part in ("planted", "movielens"))
    save(folder / "peers-step.png", (5, 10), partial(plot.draw_peers, measurements=of_peers, kind="step"))
    save(folder / "peers-loop.png", (5, 7), partial(plot.draw_peers, measurements=of_peers, kind="loop"))
    save(folder / "scaling.png", (5, 13), partial(plot.draw_curves, measurements=of_peers))
    save(folder / "quality.png", (10, 7), partial(lazy_plot.draw, findings=of_lazy))
    save(folder / "memory.png", (5, 10.8), lambda figure: quality.draw(figure, *of_states))
    of_rows = measured(runs, "rows")
    save(folder / "rows.png", (10, 3.6), partial(rows.draw, measurements=of_rows))
    with mpl.rc_context(DARK):
        save(folder / "rows-dark.png", (10, 3.6), partial(rows.draw, measurements=of_rows, dark=True))


def save(path: Path, size: tuple[float, float], draw_on: Any) -> None:
    """A figure outside pyplot: no display is needed, and no global state is left behind."""
    figure = Figure(figsize=size, dpi=144, layout="constrained")
    draw_on(figure)
    figure.savefig(path)
