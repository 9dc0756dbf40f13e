"""Every shell block of the documentation says who runs it; what a CPU can run in seconds is run here.

Above each ``sh`` block of ``docs/*.md`` stands one comment: ``<!-- run -->`` (run below, line by line, in one folder a
page), ``<!-- session: NAME -->`` (a session of noxfile.py runs it), or ``<!-- needs: WHAT -->`` (no CPU can).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3_core.cli.app import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(ROOT.glob("docs/*.md"))
#: Whoever writes these pages decides; blocks without a comment are allowed there.
FREE = {"chat.md", "design.md"}
_BLOCK = re.compile(r"(?:<!-- (run|session: [\w-]+|needs: [^>]+?) -->\n)?```sh\n(.*?)```", re.S)
#: Exit statuses that are right for a command wherever it runs: doctor tells about this machine.
_EITHER = ("k3 doctor",)


def blocks() -> list[tuple[str, str, str]]:
    """(page, comment, text) of every shell block."""
    return [(page.name, mark, text) for page in PAGES for mark, text in _BLOCK.findall(page.read_text())]


def lines_to_run(page: str) -> list[str]:
    return [line for name, mark, text in blocks() if name == page and mark == "run" for line in text.splitlines()]


def test_every_block_says_who_runs_it() -> None:
    assert len(blocks()) > 10
    assert [(page, text) for page, mark, text in blocks() if not mark and page not in FREE] == []


def test_sessions_that_are_named_exist() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    known = set(re.findall(r"@nox\.session\(name=\"([\w-]+)\"\)", noxfile))
    known |= set(re.findall(r"@nox\.session(?:\([^)]*\))?\ndef (\w+)\(", noxfile))
    named = {mark.removeprefix("session: ") for _, mark, _ in blocks() if mark.startswith("session")}
    others = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("ci/**/*.md"),
    ]
    texts = "\n".join(path.read_text() for path in [*PAGES, *others])
    named |= set(re.findall(r"python3\.11 ci (?!SESSION)([a-z][\w-]*)", texts))
    assert named - known == set()
    assert "demo" in named


@pytest.mark.parametrize("page", sorted({page for page, mark, _ in blocks() if mark == "run"}))
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for line in lines_to_run(page):
        command, _, comment = line.partition("#")
        words = shlex.split(command)
        if not words:
            continue
        assert words[0] == "k3", f"{page}: only k3 commands are run here, not {line!r}"
        done = CliRunner().invoke(app, words[1:])
        right = {0, 1} if command.startswith(_EITHER) else {1} if "exit 1" in comment else {0}
        assert done.exit_code in right, f"{page}: {line}\n{done.output}\n{done.exception}"
        assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("path", [ROOT / "README.md", *ROOT.glob("packages/*/README.md")], ids=lambda p: p.parent.name)
def test_python_of_the_readmes_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"```python\n(.*?)```", path.read_text(), re.S):
        exec(compile(text, str(path), "exec"), {})


def test_a_wrong_command_would_fail() -> None:
    assert CliRunner().invoke(app, ["plan", "--gpus", "h200"]).exit_code == 2


def test_links_between_pages_exist() -> None:
    """What `mkdocs --strict` checks, without mkdocs: relative links to pages of docs/."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text()):
            if not (page.parent / target).is_file():
                broken.append(f"{page.name} -> {target}")
    assert [b for b in broken if not b.endswith("chat.md")] == []


def test_the_numerics_page_covers_every_operator() -> None:
    from k3_core.operators import TABLE

    text = (ROOT / "docs" / "numerics.md").read_text()
    assert [name for name in TABLE if f"### {name}\n" not in text] == []


def test_the_renderer_says_when_it_cannot_import_torch(tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(\"No module named 'torch'\")\n"
        "sys.meta_path.insert(0, No())\n"
        f"sys.argv = ['render_docs.py', '--check']; runpy.run_path({str(ROOT / 'ci' / 'render_docs.py')!r},"
        " run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "numerics.md left as it is" in done.stdout
    assert "Traceback" not in done.stderr
