"""Everything that README.md and docs/ show is true: code runs and prints what they say, commands exist, names are
documented in one way, and links inside a page or between pages lead somewhere.

`make docs-test` looks at the built site.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import doc_commands
from tests.helpers.doc_blocks import LANGUAGES, PAGES, ROOT, blocks_of, commands_of
from tests.helpers.doc_readers import READERS, Reader, run_on_rank, run_page, unused_settings
from tests.helpers.doc_strings import Documented, public, reference, run_examples
from tests.helpers.ranks import Ranks

WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
DOCUMENTED = list(public())
CLASSES_AND_FUNCTIONS = [each for each in DOCUMENTED if not each.is_method]


ON_KERNELS = ("README.md", "docs/index.md")
"""What people run first. The other pages run on the reference, since to compile what they use takes minutes."""


def named(each: Documented) -> str:
    return each.name


@pytest.mark.parametrize("page", [page for page in WITH_CODE if not READERS.get(page, Reader()).ranks])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba" if page in ON_KERNELS else "reference")
    run_page(page, tmp_path, READERS.get(page, Reader()))


@pytest.mark.parametrize("page", [page for page in WITH_CODE if READERS.get(page, Reader()).ranks])
def test_the_code_of_a_page_runs_on_several_ranks(page: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(READERS[page].ranks, run_on_rank, page, str(tmp_path))


@pytest.mark.parametrize("page", READERS)
def test_a_reader_brings_only_what_the_page_needs(page: str) -> None:
    assert not unused_settings(page)


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.language for page in PAGES for block in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str) -> None:
    for words in commands_of(page):
        doc_commands.check(words)


@pytest.mark.parametrize("line", ["make nothing", "rowstep nothing", "python -m benchmarks --only nothing", "rm -r x"])
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises(doc_commands.UnknownCommandError):
        doc_commands.check(line.split())


def test_output_that_differs_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    with pytest.raises(AssertionError, match="but the code prints\n2"):
        run_page(str(page), tmp_path, Reader())


# Docstrings


def test_the_reference_lists_every_public_name() -> None:
    assert set(reference()) == {each.name for each in CLASSES_AND_FUNCTIONS}


@pytest.mark.parametrize("each", DOCUMENTED, ids=named)
def test_examples_run(each: Documented, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    try:
        count = run_examples(each)
    finally:
        if dist.is_initialized():  # where an example has failed
            dist.destroy_process_group()
    assert count or each.is_method, "expected an example"


@pytest.mark.parametrize("each", DOCUMENTED, ids=named)
def test_docstrings_follow_one_template(each: Documented) -> None:
    first, *rest = each.text.splitlines()
    assert first.endswith((".", ":")), "expected one line that is a sentence"
    assert not rest or not rest[0], "expected an empty line after the first"
    assert each.listed == each.parameters
    assert each.sections == sorted(each.sections, key=["Args", "Returns", "Yields", "Raises", "Examples"].index)
    assert not re.search(r":(class|func|meth|math):`", each.text), "expected Markdown"


@pytest.mark.parametrize("name", ["SparseAdam", "DeferredAdam", "DeferredAdamW", "arrays.Adam", "arrays.AdamW"])
def test_the_docstring_of_an_optimizer_has_its_equations(name: str) -> None:
    (each,) = (each for each in CLASSES_AND_FUNCTIONS if each.name == f"rowstep.{name}")
    assert "    p ← " in each.text


# Links and pins


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.is_file(), target
        assert not anchor or anchor in _anchors(file.read_text(encoding="utf-8")), target


def test_the_tests_that_a_page_names_are_there() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"`(\w+/test_\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    }
    assert "sparse/test_bad_input" in named
    assert [name for name in sorted(named) if not (ROOT / "tests" / f"{name}.py").is_file()] == []


def _anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub and MkDocs both make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_packages_of_the_site_are_pinned() -> None:
    extra = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra
    pins = {line.partition("==")[0] for line in (ROOT / "constraints-docs.txt").read_text().splitlines()}
    assert set(re.findall(r'"([\w-]+)>=', extra[1])) <= pins
