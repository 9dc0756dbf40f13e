"""Puts this folder on the path so that tests can `import amd_support`; the shared suites' assertions are explained."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("k3_core.vllm.testing")
