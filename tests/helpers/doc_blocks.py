"""The fenced blocks of README.md and of the pages in docs/, and the commands that their prose names."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^( *)(`{3,})([^`\n]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PROGRAMS = ("make ", "pip install ", "python -m ", "rowstep ")

LANGUAGES = {"python", "output", "bash", "dockerfile", "diff", "math", "text"}
"""What a block may be. ``output`` is what the python block before it prints; ``text`` and ``diff`` are only shown."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        body = re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE)
        language = match[3].split()[0] if match[3].strip() else _guess(body)
        found.append(Block(page, before.count("\n") + 1, language, body))
    return found


def _guess(text: str) -> str:
    """Of a block that does not say: commands, or something to look at."""
    return "bash" if text.startswith(_PROGRAMS) else "text"


def commands_of(page: str) -> list[list[str]]:
    """Every command in a block of commands, and in the prose."""
    lines = []
    for block in blocks_of(page):
        text = block.text.replace("\\\n", " ").replace(" && ", "\n")
        if block.language == "bash":
            lines += text.splitlines()
        elif block.language == "dockerfile":
            lines += re.sub("^RUN ", "", text, flags=re.MULTILINE).splitlines()
    prose = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    spans = (" ".join(span.split()) for span in _INLINE.findall(prose) if span.startswith(_PROGRAMS))
    lines += [line for span in spans for line in span.split(" && ")]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [_without_settings(words) for words in commands if words]


def _without_settings(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words
