"""Every figure of README.md and docs/ is from a run in benchmarks/results, or is listed here with the reason why not.

After a change: `make figures`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, pages

NOT_MEASURED = {
    "docs/host.md": {"50 ms": "what the benchmark sleeps, in place of a model"},
    "docs/peers.md": {"50 ms": "how long the benchmark warms up"},
    "docs/scaling.md": dict.fromkeys(
        ("5.2 ms", "170 ms", "1.01x", "1x", "3 ms"), "predicted for 64 hosts, as the page says"
    ),
}
PAGES = {str(path.relative_to(pages.ROOT)): path for path in pages.pages()}


@cache
def runs() -> dict[str, Any]:
    return pages.load()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_figures_of_the_runs(page: str) -> None:
    text = PAGES[page].read_text()
    if "<!-- table: " in text or "<!-- f: " in text:
        assert pages.fill(text, figures.tables(runs()), figures.numbers(runs())) == text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_figure_by_hand(page: str) -> None:
    assert set(pages.typed(PAGES[page].read_text())) == set(NOT_MEASURED.get(page, ()))


@pytest.mark.parametrize("page", PAGES)
def test_a_mark_begins_no_line_and_is_on_one(page: str) -> None:
    """A line that begins with a comment is HTML to Markdown, and its text is shown as it stands."""
    text = PAGES[page].read_text()
    assert not re.search(r"^\s*<!-- (f: \S+|/) -->", text, re.MULTILINE)
    assert (
        text.count("<!-- f: ") == text.count("<!-- / -->") == len(re.findall(r"<!-- f: \S+ -->[^<\n]*<!-- / -->", text))
    )


def test_figures_are_put_between_their_marks() -> None:
    page = "It is <!-- f: a.b -->2<!-- / --> times faster.\n\n<!-- table: t -->\nold\n<!-- end of table -->\n"
    filled = pages.fill(page, {"t": "| new |"}, {"a.b": "3 to 4"})
    assert "<!-- f: a.b -->3 to 4<!-- / --> times" in filled
    assert "<!-- table: t -->\n\n| new |\n\n<!-- end of table -->\n" in filled
    assert pages.fill(filled, {"t": "| new |"}, {"a.b": "3 to 4"}) == filled
    with pytest.raises(pages.PageError, match="no run has t, which a page asks for"):
        pages.fill(page, {}, {"a.b": "3"})


def test_a_quick_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"quick": true}')
    with pytest.raises(pages.PageError, match="rows are quick ones, whose figures mean nothing: measure again"):
        pages.load(tmp_path)


@pytest.mark.parametrize("found", ["9 to 17 times", "7.6x", "1,200 ms", "40us", "40 µs", "2 times"])
def test_a_figure_by_hand_is_noticed(found: str) -> None:
    assert pages.typed(f"A step\nis {found.replace(' ', chr(10), 1)} faster at 10M x 32.") == [found]
    assert pages.typed(f"`{found}`\n\n```text\n{found}\n```\n\n1,000 x 64 <!-- f: a -->{found}<!-- / --> times") == []


def test_a_range_has_the_worst_case_in_it() -> None:
    assert figures.span([16.71, 8.84, 13.1]) == "8.8 to 17"
    assert figures.span([2.51, 2.49]) == "2.5"
    assert figures.span([1234.5, 0.456]) == "0.46 to 1,234"
