"""What the sessions of noxfile.py do, one function a lane; every lane runs on wheels."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import envs
import hardware
import nox

ROOT = envs.ROOT
RESULTS = ROOT / "build" / "results"


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0


class Runs:
    """A series of commands that all run even if one fails; ``close`` prints the sum and fails where one did."""

    def __init__(self, session: nox.Session) -> None:
        self.session = session
        self.total = Count()
        self.broken: list[str] = []
        self.began = time.monotonic()
        RESULTS.mkdir(parents=True, exist_ok=True)

    def command(self, label: str, *command: str, env: dict[str, str] | None = None) -> bool:
        """Run a command that is not pytest; a non-zero exit counts as one failure."""
        started = self._begin(label)
        ok = subprocess.call(command, cwd=ROOT, env=_environment(env)) == 0
        self._note(label, ok, started)
        if ok:
            self.total.passed += 1
        else:
            self.total.failed += 1
        return ok

    def pytest(self, python: str, label: str, *args: str, env: dict[str, str] | None = None) -> None:
        """Run pytest with ``python``; its counts join the sum. No test collected is a failure."""
        started = self._begin(label)
        report = RESULTS / (label.replace(" ", "-").replace("/", "-") + ".xml")
        report.unlink(missing_ok=True)
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *args]
        code = subprocess.call(command, cwd=ROOT, env=_environment(env))
        if not report.exists():
            self.total.failed += 1
        else:
            suite = next(ET.parse(report).getroot().iter("testsuite"))
            number = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
            bad = number["failures"] + number["errors"]
            self.total.failed += bad or (1 if code else 0)
            self.total.skipped += number["skipped"]
            self.total.passed += number["tests"] - bad - number["skipped"]
        self._note(label, code == 0, started)

    def _begin(self, label: str) -> float:
        now = time.monotonic()
        self.session.log(f"{label}: starts, {(now - self.began) / 60:.0f} min into the session")
        return now

    def _note(self, label: str, ok: bool, started: float) -> None:
        if not ok:
            self.broken.append(label)
        self.session.log(f"{label}: {'passed' if ok else 'FAILED'} in {time.monotonic() - started:.0f} s")

    def fail(self, label: str) -> None:
        """Count a failure that no command reported."""
        self.total.failed += 1
        self._note(label, False, time.monotonic())

    def close(self) -> None:
        """Print the sum of all runs in pytest's plain form; fail the session where a run failed."""
        t = self.total
        print(f"\n{t.passed} passed, {t.failed} failed, {t.skipped} skipped", flush=True)
        if self.broken or t.failed:
            self.session.error("failed: " + ", ".join(self.broken or ["see above"]))


#: For lanes of engines: vLLM compiles a few lines of its sampler with torch.compile, which costs each process that asks
#: for log probabilities ten seconds. Servers of the tests and the demo compile as users' do (serve_support.py).
EAGER = {"TORCH_COMPILE_DISABLE": "1"}


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    base = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**os.environ, **base, **(extra or {})}


def test_dirs(*packages: str) -> list[str]:
    return [f"packages/{package}/tests" for package in packages]


def test_files(package: str) -> list[Path]:
    """Test files of a package."""
    return sorted((ROOT / "packages" / package / "tests").glob("test_*.py"))


def lint(runs: Runs, python: str) -> None:
    """Ruff's rules, ruff's format, import-linter's contracts."""
    runs.command("ruff check", python, "-m", "ruff", "check", ".")
    runs.command("ruff format", python, "-m", "ruff", "format", "--check", ".")
    source = ":".join(str(ROOT / "packages" / p / "src") for p in envs.PACKAGES)
    runs.command(
        "import rules",
        python,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        env={"PYTHONPATH": source},
    )


def types(runs: Runs, python: str) -> None:
    """Mypy, strict about our own annotations."""
    runs.command("mypy", python, "-m", "mypy")


def kernels(runs: Runs, package: str) -> None:
    """Kernel numerics under Triton's interpreter and ahead-of-time compilation within resource budgets."""
    python = str(envs.ensure("kernels"))
    envs.install_wheels("kernels", envs.build_wheels(("k3-core", package)))
    tests = sorted((ROOT / "packages" / package / "tests").glob("test_*kernel*.py"))
    if tests:
        runs.pytest(python, f"{package} kernels", "-n2", "-m", "not gpu and not serve", *map(str, tests))
    for gate in sorted((ROOT / "packages" / package / "tests").glob(f"{package.removeprefix('k3-')}_kernels_gate.py")):
        for name in ("kernels", "kernels-3.9"):
            label = f"{package} compiled within its table, {name}"
            runs.command(label, str(envs.ensure(name)), "-W", "ignore", str(gate))


def vllm_tests(*patterns: str) -> list[str]:
    """Test files of k3-core that touch vLLM."""
    found = [str(p) for pattern in patterns for p in sorted((ROOT / "packages/k3-core/tests").glob(pattern))]
    if not found:
        raise SystemExit(f"no test matches {patterns}")
    return found


def older_vllm(runs: Runs, name: str) -> None:
    """Everything that touches vLLM, on the oldest release that serves everything."""
    python = str(envs.ensure(name, dev=True))
    envs.install_wheels(name, envs.build_wheels())
    tests = vllm_tests("test_vllm_*.py", "test_serve_*.py")
    runs.pytest(python, f"serve {name}", "-n2", "--dist=loadfile", *tests, env=EAGER)


def oldest_vllm(runs: Runs, name: str) -> None:
    """Loading only: the wheel imports, registers and resolves its classes beside a vLLM that knows no Kimi K3."""
    python = str(envs.ensure(name, dev=True))
    envs.install_wheels(name, envs.build_wheels())
    runs.pytest(python, f"load {name}", "-n2", *vllm_tests("test_vllm_registration.py", "test_vllm_versions.py"))


def prepare(*environments: tuple[str, bool]) -> threading.Thread:
    """Make environments in the background, in order, while tests run; a failure shows when a lane asks again."""

    def work() -> None:
        with contextlib.suppress(SystemExit):
            for name, dev in environments:
                envs.ensure(name, dev=dev)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wiring(runs: Runs, package: str, *options: str, serve: bool = False) -> None:
    """A GPU vendor's package with both vLLM and Triton in reach: launchers check what the layers hand them."""
    python = str(envs.ensure("nvidia", dev=True))
    envs.install_wheels("nvidia", envs.build_wheels(("k3-core", package)))
    marks = "not gpu" if serve else "not gpu and not serve"
    tests = [str(p) for p in test_files(package) if "kernel" not in p.name]
    runs.pytest(python, package, *(options or ("-n2", "--dist=loadfile")), "-m", marks, *tests)


#: Prints which GPU a torch sees: the vendor of its build, then the device's name.
GPU = "import torch; print('hip' if torch.version.hip else 'cuda', torch.cuda.get_device_name())"


def _gpu() -> tuple[str, str]:
    """(vendor's package, name) of the GPU that the machine's own torch sees; empty where there is none."""
    done = subprocess.run([hardware.home_python(), "-c", GPU], capture_output=True, text=True)
    kind, _, name = done.stdout.strip().partition(" ") if done.returncode == 0 else ("", "", "")
    return {"hip": "k3-amd", "cuda": "k3-nvidia"}.get(kind, ""), name


def vendor(session: nox.Session, package: str) -> None:
    """A GPU vendor's lane: wiring and kernels on a CPU, then hardware tests on a GPU, or a word that they did not run.

    ``--image`` does all of it inside the image of ci/images/<vendor>; ``--hardware-only`` leaves out the CPU's part;
    ``--require-gpu`` makes a missing GPU of the vendor a failure; the rest goes to pytest. On another vendor's GPU the
    same kernels run too, which shows their semantics on a second device and nothing about the vendor's.
    """
    flags = {"--image", "--hardware-only", "--require-gpu"}
    asked, rest = flags & set(session.posargs), [a for a in session.posargs if a not in flags]
    short = package.removeprefix("k3-")
    if "--image" in asked:
        if code := hardware.run_in_image(short):
            session.error(f"the lane in the image ended with {code}")
        return
    runs = Runs(session)
    if "--hardware-only" not in asked:
        wiring(runs, package, *rest, serve=True)
        kernels(runs, package)
    tests = [p for p in test_files(package) if "mark.gpu" in p.read_text()]
    owner, name = _gpu()
    if owner:
        python = hardware.overlay(short, ("k3-core", package))
        runs.pytest(python, f"{package} on {name}", "-m", "gpu", *rest, *map(str, tests))
    else:
        print(f"\nnot run: no GPU that the torch of {hardware.home_python()} sees: {', '.join(p.name for p in tests)}")
    if "--require-gpu" in asked and owner != package:
        runs.fail(f"GPU required (--require-gpu) and {name or 'none'} found")
    runs.close()


#: (environment, wheels in it, K3_IMPL, the wheel that must act): what users combine. A vendor's wheel acts on a CPU
#: only when asked to.
PAIRS = (
    ("vllm-0.32.0", ("k3-core",), "", "k3-core"),
    ("vllm-0.32.0", ("k3-core", "k3-nvidia"), "", "k3-core"),
    ("vllm-0.32.0", ("k3-core", "k3-nvidia"), "nvidia", "k3-nvidia"),
    ("vllm-0.32.0", envs.PACKAGES, "", "k3-core"),
    ("vllm-0.27.0", ("k3-core",), "", "k3-core"),
    ("vllm-0.23.0", ("k3-core",), "", "k3-core"),
    ("vllm-0.23.0", ("k3-core", "k3-ascend"), "ascend", "k3-ascend"),
)


def smoke_alone(runs: Runs) -> None:
    """Each wheel (a vendor's with core) with nothing beside it but ``packaging``: it imports, and says one line."""
    plain = next(line for line in (envs.CONSTRAINTS / "docs.txt").read_text().split() if line.startswith("packaging=="))
    for package in envs.PACKAGES:
        home = envs.VENVS / f"smoke-{package}"
        shutil.rmtree(home, ignore_errors=True)
        envs.create(home, "--without-pip")
        wheels = envs.build_wheels(("k3-core",) if package == "k3-core" else ("k3-core", package))
        envs.pip(home, "--no-deps", plain, *map(str, wheels), by=envs.ensure_ci())
        runs.command(f"smoke {package}", str(envs.python_of(home)), "ci/smoke_check.py", package)


def smoke(session: nox.Session) -> None:
    """Each wheel alone, then the supported pairs beside vLLM."""
    runs = Runs(session)
    smoke_alone(runs)
    for name, packages, wanted, acts in PAIRS:
        python = str(envs.ensure(name))
        envs.install_wheels(name, envs.build_wheels(packages))
        label = f"smoke {name}: {' + '.join(packages)}" + (f" with K3_IMPL={wanted}" if wanted else "")
        runs.command(label, python, "ci/smoke_check.py", *packages, "--acts", acts, env={"K3_IMPL": wanted})
    runs.close()


def bench_core(session: nox.Session, python: str) -> None:
    """Run k3-core's benchmarks one after another, then render their page."""
    for script in sorted((ROOT / "packages/k3-core/benchmarks").glob("bench_*.py")):
        session.run(python, str(script), *session.posargs)
    session.run(python, "ci/render_docs.py")


def docs(runs: Runs) -> None:
    """mkdocs in strict mode: a broken link or anchor, or a page outside the navigation, is a failure."""
    runs.command("docs", str(envs.ensure_docs()), "-m", "mkdocs", "build", "--strict", "-q")
