"""The code blocks of every page that a user reads, and who runs each: ``import docs_blocks`` (see conftest.py).

Above each block, but for output (``text``), stands one comment:

``<!-- run -->``            `test_docs_commands.py` runs it: ``k3`` commands line by line, Python as one program
``<!-- serve -->``          `test_serve_docs.py` runs it against a served tiny checkpoint; ``serve: NAME`` if NAME is
                            installed
``<!-- session: NAME -->``  sessions of noxfile.py that run it
``<!-- needs: WHAT -->``    no CPU can run it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("ci/**/*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("packages/*/tests/**/*.md"),
    }
)
_BLOCK = re.compile(r"(?:^<!-- ((?:run|serve|session|needs)[^\n]*?) -->\n)?^```([^\n]*)\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``mark`` is the comment above it, empty where there is none."""

    page: str
    mark: str
    language: str
    text: str

    @property
    def label(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:50]}"


def blocks() -> list[Block]:
    """All fenced blocks, in order."""
    return [
        Block(str(page.relative_to(ROOT)), mark, language, text)
        for page in PAGES
        for mark, language, text in _BLOCK.findall(page.read_text())
    ]


def indented(text: str) -> list[str]:
    """First lines of code blocks that are indented instead of fenced, which carry no comment."""
    found, before, fenced, inside = [], "", False, False
    lines = text.split("\n")
    for i, line in enumerate(lines):
        fenced ^= line.startswith("```")
        blank_above = i > 0 and not lines[i - 1].strip()
        listed = re.match(r"\s*([-*+]|\d+\.|!!!|\?\?\?)\s", before)  # items and admonitions go on like that
        if not fenced and line.startswith("    ") and blank_above and not inside and not listed:
            found.append(line.strip())
        if line.strip():
            inside = line.startswith("    ")
            before = before if inside else line
    return found
