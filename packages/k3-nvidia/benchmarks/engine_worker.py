"""What ``bench_engine.py`` runs inside the engine's own process: random weights, device time, what was compiled.

Functions are sent by ``LLM.collective_rpc`` and act on the worker they are given. Nothing here is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Kernels of one step follow each other within a few microseconds (one graph, or a launch queue that is never empty);
#: a longer pause is the device waiting for the host and belongs to no step.
PAUSE_US = 20.0

_profile: Any = None


def randomise(worker: Any) -> int:
    """Weights of ordinary size and random experts, in place: graphs keep their addresses. Returns the layer count."""
    from k3_core.vllm.serving.experts import RoutedExperts

    model = worker.model_runner.model
    for name, p in model.named_parameters():
        if "norm" in name and p.dim() == 1:
            p.data.fill_(1.0)
        elif name.endswith("A_log"):
            p.data.fill_(0.3)
        elif name.endswith("dt_bias"):
            p.data.uniform_(-4, 0)
        elif name.endswith("e_score_correction_bias"):
            p.data.zero_()
        elif "scale" in name:  # of vLLM's packed experts, in whatever form its kernel wants
            p.data.fill_(2.0**-8) if p.dtype.itemsize > 1 else p.data.view(torch.uint8).fill_(119)
        elif not p.is_floating_point():
            p.data.view(torch.uint8).random_(0, 256)
        elif p.dim() > 0 and p.dtype.itemsize > 1:
            p.data.normal_(0, 0.02)
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            for name, tensor in module.store.tensors().items():
                raw = tensor.view(torch.uint8)
                if tensor.is_floating_point() and tensor.dtype.itemsize > 1:  # not packed: any bytes would hold NaN
                    tensor.normal_(0, 0.02)
                elif name.startswith("s") or name.endswith("scale"):
                    raw.random_(117, 121)
                else:
                    raw.random_(0, 256)
    return len(model.model.layers)


def watch(worker: Any) -> None:
    """Note every kernel of this wheel that is compiled from now on."""
    import gpu_smoke

    gpu_smoke.watch_compiler()


def compiled(worker: Any) -> list[str]:
    """Kernels compiled since the last call."""
    import gpu_smoke

    return gpu_smoke.compiled_since()


def facts(worker: Any) -> dict[str, Any]:
    """Graphs captured, their mode, and the most memory allocated so far."""
    from vllm.compilation.counter import compilation_counter

    return {
        "cudagraph_mode": str(worker.vllm_config.compilation_config.cudagraph_mode),
        "graphs": compilation_counter.num_cudagraph_captured,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
    }


def start_profile(worker: Any) -> None:
    """Record the device's kernels from now on."""
    global _profile
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    _profile = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    _profile.__enter__()


def stop_profile(worker: Any, tokens: int | None, keep: str = "") -> dict[str, Any]:
    """What the trace says of a decoding step, or of a request.

    tokens: of each request of a run (``engine_steps.decode``), None for one request (``engine_steps.request``);
    keep: a file for the trace, "" for none.
    """
    import engine_steps

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _profile.__exit__(None, None, None)
    events = [e for e in _profile.events() if str(e.device_type).endswith("CUDA")]
    launches = [(e.name, getattr(e, "device_resource_id", 0), e.time_range.start, e.time_range.end) for e in events]
    if keep:
        engine_steps.write(Path(keep), launches, tokens, PAUSE_US)
    if tokens is None:
        return engine_steps.request(launches, PAUSE_US)
    return engine_steps.decode(launches, tokens, PAUSE_US)
