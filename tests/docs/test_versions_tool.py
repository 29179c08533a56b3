"""What ``make versions`` makes of the runs that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import versions
from tools.versions import PAGE, Outcome, table, with_table

GOOD = Outcome(("2.8.0", "3.11.7", "0.68.1", "2.4.6"), passed=90, failed=0, skipped=2, seconds=61.7)


def test_the_page_has_a_table_to_replace() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = with_table(page, table([GOOD]))
    assert table([GOOD]) in new
    assert new.splitlines()[0] == page.splitlines()[0]
    assert new.splitlines()[-1] == page.splitlines()[-1]
    assert new.count("| torch |") == 1
    with pytest.raises(ValueError, match="has no table to replace"):
        with_table("# A page without one\n", table([GOOD]))


def test_only_a_run_of_all_versions_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "versions.md"
    page.write_text("| torch |\n|---|\n\nend\n")
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "try_version", lambda version: GOOD._replace(versions=(version, "", "", "")))
    assert versions.main(["2.8.0"]) == 0
    assert page.read_text() == "| torch |\n|---|\n\nend\n"
    assert versions.main([]) == 0
    assert [line.split(" ")[1] for line in page.read_text().splitlines()[2:6]] == list(versions.VERSIONS)
