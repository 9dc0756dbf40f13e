"""How every command prints: a rich table for a person, or one JSON object on standard output with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

console = Console()

#: The ``--json`` option that every command has.
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output instead of text.")]


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object; where the output's encoding lacks a character, with escapes."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=1, default=str)
    print(text)


def table(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
    """Print a table; columns named in ``right`` are numbers. Cells are shown as they are, never as markup."""
    view = Table(title=title, title_justify="left", title_style="bold")
    for name in headers:
        view.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        view.add_row(*(_plain(cell) for cell in row))
    console.print(view)


def say(text: str) -> None:
    """Print one line as it is: no markup, no colour of numbers, no wrapping (so that it can be copied)."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def size(nbytes: float) -> str:
    """Bytes in GiB, or in MiB below one GiB."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"


def _plain(cell: object) -> str:
    return str(cell).replace("[", "\\[")
