"""Fixtures of k3-nvidia's tests; puts this folder on the path so that tests can `import nvidia_support`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("k3_core.vllm.testing")


@pytest.fixture(scope="session")
def nvidia_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random 5-layer Kimi K3 whose KDA states last for hundreds of tokens: a lost state shows."""
    from k3_core.checkpoint import write_tiny

    return write_tiny(tmp_path_factory.mktemp("nvidia-k3"), "k3", seed=3, long_memory=True)


@pytest.fixture(scope="session")
def nvidia_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random 7-layer Kimi-Linear with long memory."""
    from k3_core.checkpoint import write_tiny

    return write_tiny(tmp_path_factory.mktemp("nvidia-linear"), "linear", seed=5, long_memory=True)


@pytest.fixture(scope="module")
def _alone(request: pytest.FixtureRequest) -> str:
    """Output of the module's tests in a process without Triton's interpreter; "" where this process has none."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return ""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(request.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def without_interpreter(_alone: str) -> None:
    """The test needs kernels as Triton compiles them, whatever another module of this process asked for."""
    if _alone:
        pytest.skip(f"in a process of its own: {_alone.splitlines()[-1]}")
