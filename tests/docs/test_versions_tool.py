"""What ``make versions`` makes of the runs that it starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import versions
from tools.versions import COLUMNS, PAGE, Outcome, table, try_version, with_table

GOOD = Outcome(("2.8.0", "3.11.7", "0.68.1", "2.4.6"), passed=90, failed=0, skipped=2, seconds=61.7)


def test_a_line_for_each_version() -> None:
    missing = Outcome(("newest", "", "", ""), code=1)
    head, _, first, second = table([GOOD, missing]).splitlines()
    assert head == f"| {' | '.join(COLUMNS)} |"
    assert first == "| 2.8.0 | 3.11.7 | 0.68.1 | 2.4.6 | 90 | 0 | 2 | 62 |"
    assert second == "| newest |  |  |  |  | did not run |  |  |"


def test_the_page_has_a_table_to_replace() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = with_table(page, table([GOOD]))
    assert table([GOOD]) in new
    assert new.splitlines()[0] == page.splitlines()[0]
    assert new.splitlines()[-1] == page.splitlines()[-1]
    assert new.count("| torch |") == 1
    with pytest.raises(ValueError, match="has no table to replace"):
        with_table("# A page without one\n", table([GOOD]))


def test_a_version_that_cannot_be_installed_is_a_failure_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_half_way(version: str) -> str:
        (tmp_path / "environment").mkdir()
        raise subprocess.CalledProcessError(3, ["pip", "install", version])

    monkeypatch.setattr(versions, "ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(versions, "make_environment", fail_half_way)
    outcome = try_version("0.0.1")
    assert outcome == Outcome(("0.0.1", "", "", ""), code=3)
    assert not outcome.is_good
    assert not (tmp_path / "environment").exists()


def test_only_a_run_of_all_versions_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "versions.md"
    page.write_text("| torch |\n|---|\n\nend\n")
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "try_version", lambda version: GOOD._replace(versions=(version, "", "", "")))
    assert versions.main(["2.8.0"]) == 0
    assert page.read_text() == "| torch |\n|---|\n\nend\n"
    assert versions.main([]) == 0
    assert [line.split(" ")[1] for line in page.read_text().splitlines()[2:6]] == list(versions.VERSIONS)
