"""Every task of this repository: ``nox -l`` lists them; ``python3.11 ci SESSION`` runs one with nothing installed.

Sessions share the environments of ``ci/envs.py`` (made on first use, kept under ``.venv``), and always test the wheels
built from the tree, never the tree itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "ci"))

import ascend_lane  # noqa: E402
import envs  # noqa: E402
import lanes  # noqa: E402

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False

VENDORS = ("k3-nvidia", "k3-amd", "k3-ascend")
VLLM = "vllm-0.32.0"
OLDER = "vllm-0.27.0"
OLDEST = "vllm-0.23.0"


def _python(session: nox.Session, name: str, packages: tuple[str, ...] = envs.PACKAGES) -> str:
    """The python of environment ``name`` with freshly built wheels in it."""
    python = envs.ensure(name, dev=True)
    envs.install_wheels(name, envs.build_wheels(packages))
    session.log("wheels: " + ", ".join(sorted(p.name for p in (ROOT / "dist").glob("*.whl"))))
    return str(python)


@nox.session
def demo(session: nox.Session) -> None:
    """Serve a tiny random Kimi K3 with vLLM on the CPU and chat with it (`-- --keep` leaves the server running)."""
    python = envs.ensure(VLLM)
    envs.install_wheels(VLLM, envs.build_wheels(("k3-core",)))
    session.run(str(python), "ci/demo.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All that needs no accelerator: lint, types, docs, archives, all packages, kernels, three vLLM versions."""
    runs = lanes.Runs(session)
    first = lanes.prepare((VLLM, True))
    lanes.docs(runs)  # this and the next two need no vLLM
    runs.command("reproducible archives", str(envs.ensure_ci()), "ci/release.py", "--reproducible")
    lanes.smoke_alone(runs)
    first.join()
    python = _python(session, VLLM)
    others = lanes.prepare(
        ("nvidia", True), ("kernels-3.9", False), ("ascend", True), ("ascend-kernels", True), (OLDER, True)
    )  # and with them what they lie over: OLDEST and "kernels", too
    lanes.lint(runs, python)
    lanes.types(runs, python)
    unit = lanes.test_dirs("k3-core")  # the vendors have their own below
    runs.pytest(python, "unit", "-n2", "-m", "not serve and not gpu and not long", *unit)
    serve = lanes.test_dirs("k3-core", "k3-nvidia", "k3-amd")
    runs.pytest(python, "serve 0.32.0", "-n2", "--dist=loadfile", "-m", "serve and not gpu", *serve, env=lanes.EAGER)
    runs.command("demo", python, "ci/demo.py")
    others.join()
    for package in ("k3-nvidia", "k3-amd"):
        lanes.wiring(runs, package)
        lanes.kernels(runs, package)
    ascend_lane.wiring(runs)
    ascend_lane.kernels(runs)
    lanes.older_vllm(runs, OLDER)
    lanes.oldest_vllm(runs, OLDEST)
    runs.close()


@nox.session(name="tests-k3-core")
def tests_core(session: nox.Session) -> None:
    """The tests of k3-core on vLLM 0.32.0 (arguments go to pytest)."""
    runs = lanes.Runs(session)
    options = session.posargs or ["-n2", "--dist=loadfile"]
    runs.pytest(_python(session, VLLM), "k3-core", *options, *lanes.test_dirs("k3-core"))
    runs.close()


@nox.session(name="tests-oldest")
def tests_oldest(session: nox.Session) -> None:
    """k3-core on vLLM 0.27.0 (all that touches vLLM) and 0.23.0 (it loads and registers)."""
    runs = lanes.Runs(session)
    lanes.older_vllm(runs, OLDER)
    lanes.oldest_vllm(runs, OLDEST)
    runs.close()


@nox.session(name="test-nvidia")
def test_nvidia(session: nox.Session) -> None:
    """Build k3-nvidia, install it clean, run what this machine allows (`-- --require-gpu`, `-- --image`)."""
    lanes.vendor(session, "k3-nvidia")


@nox.session(name="test-amd")
def test_amd(session: nox.Session) -> None:
    """Build k3-amd, install it clean, run what this machine allows (`-- --require-gpu`, `-- --image`)."""
    lanes.vendor(session, "k3-amd")


@nox.session(name="test-ascend")
def test_ascend(session: nox.Session) -> None:
    """Build k3-ascend, install it clean, run what this machine allows (`-- --require-npu`, `-- --image`)."""
    ascend_lane.test_ascend(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff (rules and format) and the import rules of the design."""
    runs = lanes.Runs(session)
    lanes.lint(runs, str(envs.ensure(VLLM, dev=True)))
    runs.close()


@nox.session
def types(session: nox.Session) -> None:
    """Mypy over the four packages."""
    runs = lanes.Runs(session)
    lanes.types(runs, str(envs.ensure(VLLM, dev=True)))
    runs.close()


@nox.session
def build(session: nox.Session) -> None:
    """Build the four wheels and sdists into dist/, each twice: the bytes must be the same."""
    session.run(str(envs.ensure_ci()), "ci/release.py", "--reproducible", "dist")


@nox.session
def release(session: nox.Session) -> None:
    """Changelog, version and API snapshot of one package (`k3-core --check`, `k3-core 0.2.0`, `--reproducible`)."""
    session.run(str(envs.ensure_ci()), "ci/release.py", *session.posargs)


@nox.session
def smoke(session: nox.Session) -> None:
    """Install each wheel in a clean environment, import and register it."""
    lanes.smoke(session)


@nox.session
def fuzz(session: nox.Session) -> None:
    """20,000 generated conversations there and back, then random streams into the chat decoder (`-- --minutes 5`)."""
    python = _python(session, VLLM, ("k3-core",))
    session.run(python, "-m", "pytest", "-q", "-m", "long", "packages/k3-core/tests/test_chat_round_trip.py")
    session.run(python, "packages/k3-core/tests/fuzz_chat.py", *(session.posargs or ["--minutes", "5"]))


@nox.session(name="bench-core")
def bench_core(session: nox.Session) -> None:
    """Measure the checkpoint reader, the reference model, its server and the chat decoder; write docs/benchmarks."""
    lanes.bench_core(session, _python(session, VLLM, ("k3-core",)))


@nox.session(name="bench-nvidia")
def bench_nvidia(session: nox.Session) -> None:
    """Kernel benchmarks on an NVIDIA GPU beside vLLM's own kernels (`-- --rows experts,kda`), in the current python."""
    session.run(sys.executable, "packages/k3-nvidia/benchmarks/bench.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link is an error."""
    runs = lanes.Runs(session)
    lanes.docs(runs)
    runs.close()
