"""Fixtures shared by k3-core's tests; puts this folder on the path so that tests can `import golden_data`."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import golden_data
import serve_support

pytest.register_assert_rewrite("contract_checks")


@pytest.fixture(scope="session")
def k3_tiny() -> Path:
    """Directory of the tiny Kimi K3 checkpoint (13 layers, text and vision). Read-only."""
    return golden_data.checkpoint("k3-tiny")


@pytest.fixture(scope="session")
def k3_linear_tiny() -> Path:
    """Directory of the tiny Kimi-Linear checkpoint (7 layers, no AttnRes). Read-only."""
    return golden_data.checkpoint("k3-linear-tiny")


@pytest.fixture(scope="session")
def long_memory_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random 5-layer Kimi K3 whose KDA states last for hundreds of tokens: a lost state shows."""
    from k3_core.checkpoint import write_tiny

    return write_tiny(tmp_path_factory.mktemp("long-memory"), "k3", seed=3, long_memory=True)


@pytest.fixture(scope="module")
def start_engine() -> Iterator[Callable[..., serve_support.Engine]]:
    """Starts engines (see `serve_support.Engine.start`), one at a time, and closes the last one after the module."""
    running: list[serve_support.Engine] = []

    def start(checkpoint: Path, **options: Any) -> serve_support.Engine:
        while running:
            running.pop().close()
        running.append(serve_support.Engine.start(checkpoint, **options))
        return running[-1]

    yield start
    while running:
        running.pop().close()
