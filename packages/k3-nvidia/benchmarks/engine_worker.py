"""What ``bench_engine.py`` runs inside the engine's own process: random weights, the latent's projections shared over
ranks that are not there, device time, what was compiled.

Functions are sent by ``LLM.collective_rpc`` and act on the worker they are given. Nothing here is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def share_latent(worker: Any, ranks: int) -> int:
    """From now on long batches compute rank 0's share of the latent's projections, as one of ``ranks`` does.

    Ours: the form ``adaptive`` of ``k3_core.vllm.serving.reductions`` from its ``SHARD_TOKENS`` tokens on, and from
    ``GATHER_TOKENS`` on a gathered latent, as the form ``sharded`` has, too. A sum over ranks is left out. The latent's
    gathering is a stand-in that writes [T, L] twice, this rank's columns in place of everyone's: what the collective
    leaves on each rank, and vLLM's pass behind it that lays the ranks' blocks side by side. vLLM's own model: with
    tensor parallelism each rank multiplies its rows of the up-projection right into its columns of the shared experts'
    result, for more than VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD (256) tokens; its down-projection is whole on every
    rank. Shorter batches stay as they are. Weights stay whole, slices are views.
    Returns the number of layers; raises RuntimeError where there is none.
    """
    from k3_core.vllm.serving import reductions
    from k3_core.vllm.serving.moe_layer import MoeLayer

    def gather(columns: Tensor, dim: int) -> Tensor:
        blocks = columns.repeat(ranks, 1).view(ranks, *columns.shape)
        return blocks.movedim(0, 1).reshape(columns.shape[0], -1)

    modules = list(worker.model_runner.model.modules())
    ours = [m for m in modules if isinstance(m, MoeLayer) and m.text.routed_expert_hidden_size is not None]
    theirs = [m for m in modules if type(m).__name__ == "LatentMoERunner"]
    if not ours and not theirs:
        raise RuntimeError("no layer's latent can be shared over ranks: the model has no experts in a latent space")
    if ours:
        reductions.tensor_model_parallel_all_gather = gather
        reductions.tensor_model_parallel_all_reduce = lambda partial: partial
    for layer in ours:
        _share_ours(layer, ranks)
    for runner in theirs:
        _share_theirs(runner, ranks)
    return len(ours) + len(theirs)


def _share_ours(layer: Any, ranks: int) -> None:
    from k3_core.vllm.serving import reductions

    layer.form, layer.ranks, layer.rank, layer._gathers = "adaptive", ranks, 0, True
    by_form = layer.forward

    def forward(x: Tensor) -> Tensor:
        if x.shape[0] >= reductions.SHARD_TOKENS:
            return by_form(x)
        routed, shared = layer.partial(x)
        return reductions.none(routed, shared, layer._finish)

    layer.forward = forward


def _share_theirs(runner: Any, ranks: int) -> None:
    from vllm import envs

    transform, alone = runner.routed_output_transform, runner.forward
    rows = transform.up_proj.weight.shape[0] // ranks

    def tail(routed: Tensor, shared: Tensor, width: int | None) -> Tensor:
        latent = routed if transform.norm is None else transform.norm(routed)
        shared[:, :rows].addmm_(latent, transform.up_proj.weight[:rows].t())
        return runner._maybe_reduce_final_output(shared, width, output_is_reduced=True)

    def forward(hidden_states: Tensor, router_logits: Tensor, *rest: Any, **named: Any) -> Tensor:
        # What ``LatentMoERunner.forward`` takes with several ranks; it picks the tail by the number of tokens itself.
        long = hidden_states.shape[0] > envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
        return (runner._fused_forward if long else alone)(hidden_states, router_logits, *rest, **named)

    runner._shard_up_proj_tail, runner.forward = tail, forward


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
        engine_steps.write(Path(keep), launches, tokens, engine_steps.PAUSE_US)
    if tokens is None:
        return engine_steps.request(launches, engine_steps.PAUSE_US)
    return engine_steps.decode(launches, tokens, engine_steps.PAUSE_US)
