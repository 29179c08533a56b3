"""Everything that README.md and docs/ show is true: code runs and prints what they say, commands exist, names are
documented in one way, links inside a page or between pages lead somewhere, and the examples run and learn.

`make docs-test` looks at the built site.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rowstep
from tests.helpers import doc_commands
from tests.helpers.doc_blocks import LANGUAGES, PAGES, ROOT, blocks_of, commands_of
from tests.helpers.doc_readers import ELSEWHERE, RANKS, run_on_rank, run_page
from tests.helpers.doc_strings import Documented, public, reference, run_examples
from tests.helpers.ranks import Ranks
from tools.versions import PAGE as VERSIONS
from tools.versions import Outcome, with_table
from tools.versions import table as versions_table

WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
DOCUMENTED = list(public())
CLASSES_AND_FUNCTIONS = [each for each in DOCUMENTED if not each.is_method]


ON_KERNELS = ("README.md", "docs/index.md")
"""What people run first. The other pages run on the reference, since to compile what they use takes minutes."""


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in RANKS and page not in ELSEWHERE])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba" if page in ON_KERNELS else "reference")
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", RANKS)
def test_the_code_of_a_page_runs_on_several_ranks(page: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(RANKS[page], run_on_rank, page, str(tmp_path))


def test_the_code_of_other_pages_is_run_elsewhere() -> None:
    for page, test in ELSEWHERE.items():
        assert f'run_page("{page}"' in (ROOT / test).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind_and_no_text_is_code(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block
        if block.language == "text":
            with pytest.raises(SyntaxError):
                compile(block.text, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str) -> None:
    for words in commands_of(page):
        doc_commands.check(words)


@pytest.mark.parametrize("line", ["make nothing", "rowstep nothing", "python -m benchmarks --only nothing", "rm -r x"])
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises(doc_commands.UnknownCommandError):
        doc_commands.check(line.split())


@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_make_lists_its_commands(arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    lines = subprocess.check_output(["make", *arguments], cwd=ROOT, text=True, env=environment).splitlines()
    (phony,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(line.split()[1] for line in lines[1:]) == sorted(phony.split())
    assert max(map(len, lines)) <= 80


def test_output_that_differs_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    with pytest.raises(AssertionError, match="but the code prints\n2"):
        run_page(str(page), tmp_path)


# Docstrings


def test_the_reference_lists_every_public_name() -> None:
    assert set(reference()) == {each.name for each in CLASSES_AND_FUNCTIONS}


@pytest.mark.parametrize("each", DOCUMENTED, ids=lambda each: each.name)
def test_examples_run(each: Documented, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    try:
        count = run_examples(each)
    finally:
        if dist.is_initialized():  # where an example has failed
            dist.destroy_process_group()
    assert count or each.is_method, "expected an example"


@pytest.mark.parametrize("each", DOCUMENTED, ids=lambda each: each.name)
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


def test_the_changelog_and_the_links_of_the_readme_on_an_index_are_those_of_this_version() -> None:
    """A version in development has no tag that links could point to."""
    version, _, is_in_development = rowstep.__version__.partition(".dev")
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading
    assert heading[1].startswith(f"[Unreleased] ({version})" if is_in_development else f"[{version}] - 20")
    replacements = re.findall(r"^replacement = .*/(.+?)/'$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert replacements == ["main" if is_in_development else "v$HFPR_VERSION"] * 2


TRIED = Outcome(("2.8.0", "3.11.7", "0.68.1", "2.4.6"), passed=90, failed=0, skipped=2, seconds=61.7)


def test_the_page_of_versions_has_a_table_to_replace() -> None:
    page = VERSIONS.read_text(encoding="utf-8")
    new = with_table(page, versions_table([TRIED]))
    assert versions_table([TRIED]) in new
    assert new.splitlines()[0] == page.splitlines()[0]
    assert new.splitlines()[-1] == page.splitlines()[-1]
    assert new.count("| torch |") == 1
    with pytest.raises(ValueError, match="has no table to replace"):
        with_table("# A page without one\n", versions_table([TRIED]))


EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_that_needs_a_package_says_which_extra(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    needed = imported - sys.stdlib_module_names - {"numpy", "rowstep", "torch"}
    named = re.findall(r"pip install -e '\.\[(\w+)\]'", text)
    assert len(named) == (2 if needed else 0)  # on top, and where the import fails
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", extras, re.MULTILINE) for extra in named)


def test_digits_are_learned_with_and_without_force_sparse() -> None:
    accuracies = runpy.run_path(str(EXAMPLES / "digits.py"))["main"](epochs=4)
    assert accuracies.keys() == {False, True}
    assert min(accuracies.values()) > 0.9


def test_a_table_of_ngrams_in_a_file_helps_to_predict_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # rounding at random takes kernels that no other test compiles
    main = runpy.run_path(str(EXAMPLES / "ngram_lm.py"))["main"]
    without, with_table = main(rows=50_000, epochs=4, share=0.15)
    assert with_table < without - 0.1 < 3.7


def test_ratings_are_learned_with_numpy_alone() -> None:
    losses = runpy.run_path(str(EXAMPLES / "numpy_only.py"))["main"](epochs=8)
    assert len(losses) == 9
    assert losses[-1] < losses[0] / 10


def test_a_recommender_finds_the_next_pick() -> None:
    before, after = runpy.run_path(str(EXAMPLES / "recommender.py"))["main"](users=1000, items=500, epochs=3)
    assert before < 0.05
    assert after > 0.35


def test_ratings_are_learned_with_the_users_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # as above
    assert runpy.run_path(str(EXAMPLES / "host_recommender.py"))["main"](users=5_000, items=100, epochs=5) < 0.7


def test_a_sharded_model_learns_ratings_in_a_single_process() -> None:
    loss, _ = runpy.run_path(str(EXAMPLES / "sharded.py"))["main"]()
    assert loss < 0.25  # guessing the mean gives 0.40


def test_word_vectors_tell_true_contexts_from_drawn_ones() -> None:
    before, after = runpy.run_path(str(EXAMPLES / "word2vec.py"))["main"](epochs=3)
    assert before < 0.55
    assert after > 0.65


def test_the_notebook_runs_and_its_optimizers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after the other in plain Python, on a smaller table: no kernel of Jupyter's is needed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # those of this process are the tests'
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for large, small in (("STEPS = 150", "STEPS = 20"), ("BATCH = 100_000", "BATCH = 1_000")):
        assert large in source
        source = source.replace(large, small)
    found: dict[str, Any] = {}
    exec(compile(source, "quickstart.ipynb", "exec"), found)
    assert max(found[name] for name in ("sparse_adam", "deferred_adam", "deferred_adamw")) < 1e-5
    assert len(pyplot.get_fignums()) == 3
    pyplot.close("all")


def test_the_notebook_has_its_outputs() -> None:
    """GitHub shows them, and downloads of the repository stay small."""
    notebook = EXAMPLES / "quickstart.ipynb"
    assert notebook.stat().st_size < 150_000
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    texts = ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    assert len(pictures) == len(texts) == len(outputs) / 2 == 3
    assert all("times as fast, losses at most" in text for text in texts)
