"""What k3-nvidia cannot serve: the suite that every vendor runs, and GPUs without bfloat16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from nvidia_support import VENDOR

from k3_core.vllm.testing.suite_refuse import RefuseSuite
from k3_nvidia.limits import NvidiaHook


class TestRefuse(RefuseSuite):
    vendor = VENDOR


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_a_gpu_without_bfloat16_is_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(*capability))
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
    assert bool(list(NvidiaHook.device_reasons(config, None))) is refused


@pytest.mark.parametrize(("dtype", "refused"), [("fp8", False), ("fp8_e4m3", False), ("fp8_e5m2", True)])
def test_a_latent_cache_that_no_backend_reads_is_refused(
    dtype: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(9, 0))
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype))
    reasons = list(NvidiaHook.device_reasons(config, None))
    assert bool(reasons) is refused
    assert all(f"--kv-cache-dtype {dtype}" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("K3_MOE_STEP", "8:late", "'late' is none of"),
        ("K3_MOE_STEP", "8:choice+early", ""),
        ("K3_MOE_STEP", "", ""),
        ("K3_HOLD", "vector:3", "0 to 2 steps"),
        ("K3_HOLD", "vector:2,dot:1", ""),
    ],
)
def test_a_switch_that_cannot_be_read_is_refused_before_weights_load(
    name: str, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "K3_HOLD":
        pytest.importorskip("triton", reason="the kernels' module imports it")
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(9, 0))
    monkeypatch.setenv(name, text)
    reasons = list(NvidiaHook.device_reasons(SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto")), None))
    assert len(reasons) == bool(words)
    assert all(f"{name}={text!r}" in reason and words in reason for reason in reasons)
