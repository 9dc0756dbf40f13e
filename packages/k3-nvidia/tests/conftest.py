"""Fixtures of k3-nvidia's tests; puts this folder on the path so that tests can `import nvidia_support`."""

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
