"""Links, anchors and file names in every page, also those that `mkdocs --strict` never sees."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import docs_blocks
import pytest
from docs_blocks import PAGES, ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$", re.S | re.M)
#: Names in backticks that are paths of this repository: they begin with one of its folders.
_PATH = re.compile(r"`((?:ci|docs|packages)/[\w./*<>-]+)`")
#: What a page may call a file by when it speaks of "the" vendor or of a run's outcome.
_PLACEHOLDER = re.compile(r"<\w+>|\*")


def anchors(text: str) -> set[str]:
    """Heading anchors as Python-Markdown's toc makes them (and GitHub, for the headings used here)."""
    heads = re.findall(r"^#+ +(.+?)\s*$", _CODE.sub("", text), re.M)
    plain = [re.sub(r"[^\w\s-]", "", head.replace("`", "")).strip().lower() for head in heads]
    return {re.sub(r"[-\s]+", "-", head) for head in plain}


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return set(done.stdout.splitlines())


def broken(page: Path) -> list[str]:
    found = []
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `k3` head\n[a](#a-k3-head) [b](#nowhere) [c](page.md#a-k3-head) [d](gone.md) [e](https://x.y)\n"
    )
    assert broken(page) == ["#nowhere", "gone.md"]


def test_files_that_pages_name_exist() -> None:
    known = tracked()
    missing = []
    for page in PAGES:
        for name in _PATH.findall(page.read_text()):
            pattern = _PLACEHOLDER.sub("*", name)
            if not list(ROOT.glob(pattern.rstrip("/"))) and pattern not in known:
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


def test_addresses_outside_are_https() -> None:
    plain = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in _LINK.findall(page.read_text())
        if target.startswith("http://")
    ]
    assert plain == []


def test_every_block_is_fenced_and_has_a_language() -> None:
    assert {b.page: b.text for b in docs_blocks.blocks() if not b.language} == {}
    found = {str(p.relative_to(ROOT)): lines for p in PAGES if (lines := docs_blocks.indented(p.read_text()))}
    assert found == {}
