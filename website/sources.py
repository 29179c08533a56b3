"""Links to files of the repository, such as ``../src/rowstep/_rules/adam.py``, lead to a page that shows the file.

In the repository such a link opens the file. The site has no files beside its pages, so each file that a page links to
becomes a page too.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+)([\w./-]+\.(?:py|toml|txt))\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file of the repository that some page links to."""
    linked: set[str] = set()
    for page in files.documentation_pages():
        linked.update(match[2] for match in LINK.finditer(page.content_string))
    for name in sorted(linked):
        page = File.generated(config, _page_of(name), content=_page(name), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Let these links lead to those pages."""
    depth = page.file.src_uri.count("/")  # type: ignore[attr-defined]
    return LINK.sub(lambda match: f"]({'../' * depth}{_page_of(match[2])})", markdown)


def _page_of(name: str) -> str:
    return f"source/{name}.md"


def _page(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))
    language = "python" if name.endswith(".py") else "text"
    # Not in the search: whoever looks for a word wants the page that explains it.
    return f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {name}\n\n{fence}{language}\n{text}{fence}\n"
