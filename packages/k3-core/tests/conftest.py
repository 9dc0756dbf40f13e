"""Fixtures shared by k3-core's tests; puts this folder on the path so that tests can `import golden_data`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import golden_data


@pytest.fixture(scope="session")
def k3_tiny() -> Path:
    """Directory of the tiny Kimi K3 checkpoint (13 layers, text and vision). Read-only."""
    return golden_data.checkpoint("k3-tiny")


@pytest.fixture(scope="session")
def k3_linear_tiny() -> Path:
    """Directory of the tiny Kimi-Linear checkpoint (7 layers, no AttnRes). Read-only."""
    return golden_data.checkpoint("k3-linear-tiny")
