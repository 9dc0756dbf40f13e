"""Every code block of the documentation says who runs it (see `docs_blocks`); what a CPU runs in seconds runs here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import PAGES, ROOT, blocks
from typer.testing import CliRunner

from k3_core.cli.app import app

#: Exit statuses that are right for a command wherever it runs: doctor tells about this machine.
_EITHER = ("k3 doctor",)
SHELL = [page for page in PAGES if any(b.page == str(page.relative_to(ROOT)) and b.mark == "run" for b in blocks())]


def run_lines(lines: list[str]) -> None:
    """Run ``k3`` commands in this process; a comment ``# exit 1`` states another exit status than 0."""
    for line in lines:
        command, _, comment = line.partition("#")
        words = shlex.split(command)
        if not words:
            continue
        assert words[0] == "k3", f"only k3 commands are run here, not {line!r}"
        done = CliRunner().invoke(app, words[1:])
        right = {0, 1} if command.startswith(_EITHER) else {1} if "exit 1" in comment else {0}
        assert done.exit_code in right, f"{line}\n{done.output}\n{done.exception}"
        assert done.exception is None or isinstance(done.exception, SystemExit)


def test_every_block_says_who_runs_it() -> None:
    assert len(blocks()) > 20
    assert [b.label for b in blocks() if not b.mark and b.language != "text"] == []


def test_what_is_run_can_be_run() -> None:
    """`needs` is for what no CPU can do: a page of `k3` commands alone hides behind no such word."""
    for block in blocks():
        if block.mark.startswith("needs"):
            lines = [line for line in block.text.splitlines() if line.strip()]
            assert not all(line.startswith("k3 ") for line in lines), block.label


def test_sessions_that_are_named_exist() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    known = set(re.findall(r"@nox\.session\(name=\"([\w-]+)\"\)", noxfile))
    known |= set(re.findall(r"@nox\.session(?:\([^)]*\))?\ndef (\w+)\(", noxfile))
    marks = [b.mark.removeprefix("session: ") for b in blocks() if b.mark.startswith("session")]
    named = {name for mark in marks for name in mark.split(", ")}
    texts = "\n".join(page.read_text() for page in PAGES)
    named |= set(re.findall(r"python3\.11 ci (?!SESSION)([a-z][\w-]*)", texts))
    assert named - known == set()
    assert "demo" in named


@pytest.mark.parametrize("page", SHELL, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder a page, in the order of the page; Python blocks share their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "packages" / "k3-core" / "tests"))
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks():
        if block.page != str(page.relative_to(ROOT)) or block.mark != "run":
            continue
        if block.language == "python":
            exec(compile(block.text, block.page, "exec"), names)
        else:
            run_lines(block.text.splitlines())


def inline() -> list[tuple[str, str]]:
    """(page, command) of every whole ``k3`` command inside a sentence."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
        for command in re.findall(r"`(k3 [a-z]+[^`]*)`", text):
            found.append((str(page.relative_to(ROOT)), " ".join(command.split())))
    return found


@pytest.mark.parametrize(("page", "command"), sorted(set(inline())))
def test_commands_inside_sentences_exist(page: str, command: str) -> None:
    """The command and each of its options are known; plans, which need nothing, are also made."""
    words = [word for word in shlex.split(command)[1:] if word != "..."]
    name = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
    name = name if name[0] == "bench" else name[:1]
    known = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*name, "--help"])
    assert known.exit_code == 0, f"{page}: {command}"
    for option in re.findall(r"--[a-z-]+", command):
        assert re.search(rf"{option}\b", known.output), f"{page}: {command} has no {option}"
    if name == ["plan"] and "..." not in command and "--gpu" in command:
        assert CliRunner().invoke(app, words).exit_code in (0, 1), f"{page}: {command}"


def test_scripts_that_pages_run_exist() -> None:
    texts = {page: page.read_text() for page in PAGES}
    named = {(page.name, name) for page, text in texts.items() for name in re.findall(r"`python (ci/[\w/]+\.py)", text)}
    assert named
    assert [entry for entry in named if not (ROOT / entry[1]).is_file()] == []


def test_a_wrong_command_would_fail() -> None:
    assert CliRunner().invoke(app, ["plan", "--gpus", "h200"]).exit_code == 2


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
