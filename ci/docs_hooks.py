"""MkDocs hook: design notes and benchmark pages join the navigation without being listed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Replace the navigation's placeholders by the pages that exist; leave an empty section out."""
    docs = Path(config["docs_dir"])
    found = {name: sorted(p.relative_to(docs).as_posix() for p in (docs / name).glob("*.md")) for name in FOLDERS}
    config["nav"] = [entry for item in config["nav"] if (entry := _filled(item, found)) is not None]
    return config


FOLDERS = ("benchmarks", "notes")


def _filled(item: Any, found: dict[str, list[str]]) -> Any:
    for title, value in item.items() if isinstance(item, dict) else ():
        if isinstance(value, str) and value in found:
            return {title: found[value]} if found[value] else None
    return item
