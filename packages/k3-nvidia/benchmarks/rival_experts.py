"""vLLM's own routed experts (Marlin and Humming) beside ours: built from its public layer factory, fed the same
weights.

Used only where ``vllm`` is importable. Padded as vLLM pads: widths below 256 become 256 when experts are sharded over
TP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import experts_case as case
import torch

PAD_FLOOR = 256


def available() -> dict[str, str]:
    """Rival name -> reason it cannot run ("" if it can)."""
    try:
        import vllm  # noqa: F401
    except Exception as err:
        why = f"vllm not importable: {type(err).__name__}: {str(err)[:200]}"
        return {"marlin": why, "humming": why}
    out = {"marlin": ""}
    try:
        from vllm.utils.import_utils import has_humming

        out["humming"] = "" if has_humming() else "humming-kernels not installed"
    except Exception as err:
        out["humming"] = f"{type(err).__name__}: {str(err)[:200]}"
    return out


_started = False


def _start(vllm_config: Any) -> None:
    """One-rank distributed state and the workspace manager, once a process."""
    global _started
    if _started:
        return
    import os

    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    init_distributed_environment(1, 0, "tcp://127.0.0.1:29531", 0, backend)
    initialize_model_parallel(1, 1)
    if torch.cuda.is_available():
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device("cuda:0"))
    _started = True


class Rival:
    """One backend's router, layer and weights for a shape."""

    def __init__(
        self, backend: str, shape: case.Shape, released: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
    ) -> None:
        from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import layer as moe_layer
        from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
        from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

        self.backend, self.shape = backend, shape
        self.config = VllmConfig(kernel_config=KernelConfig(moe_backend=backend))
        self.config.scheduler_config.max_num_batched_tokens = 8192
        width = max(shape.width, PAD_FLOOR) if shape.local == case.EXPERTS else shape.width
        device = "cuda" if torch.cuda.is_available() else "cpu"
        default = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(self.config))
            _start(self.config)
            stack.enter_context(torch.device(device))
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(torch.bfloat16)
            if shape.local != case.EXPERTS:
                original = moe_layer.make_parallel_config
                stack.callback(setattr, moe_layer, "make_parallel_config", original)
                moe_layer.make_parallel_config = lambda **kw: _as_ep(original(**kw), case.EXPERTS // shape.local)
            self.gate = GateLinear(
                case.HIDDEN, case.EXPERTS, bias=False, out_dtype=torch.float32, prefix=f"{backend}.gate"
            )
            self.runner = moe_layer.FusedMoEFactory(
                num_experts=case.EXPERTS,
                top_k=case.TOP_K,
                hidden_size=case.LATENT,
                intermediate_size=width,
                params_dtype=torch.bfloat16,
                renormalize=True,
                use_grouped_topk=True,
                num_expert_group=1,
                topk_group=1,
                quant_config=Mxfp4Config(),
                prefix=f"model.layers.1.block_sparse_moe.experts.{backend}.{shape.name}",
                scoring_func="sigmoid",
                e_score_correction_bias=torch.nn.Parameter(inputs["bias"].float(), requires_grad=False),
                activation="situ",
                activation_situ_beta=case.BETA,
                activation_situ_linear_beta=case.LINEAR_BETA,
            )
            self.gate.weight.data.copy_(inputs["router"])
            experts = self.runner.routed_experts
            # Humming asks the model configuration, which a layer alone does not have, for a user's activation override.
            object.__setattr__(self.config, "model_config", SimpleNamespace(quantization_config=None))
            fill(experts, shape.width, released)
            experts.quant_method.process_weights_after_loading(experts)
        torch.cuda.synchronize()

    def call(self, inputs: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A function that routes and runs the experts on these inputs."""
        from vllm.forward_context import set_forward_context

        hidden, latent = inputs["hidden"], inputs["latent"]
        tokens = hidden.shape[0]

        def run() -> torch.Tensor:
            with torch.no_grad(), set_forward_context(None, self.config, num_tokens=tokens):
                logits = self.gate(hidden)
                logits = logits[0] if isinstance(logits, tuple) else logits
                out: torch.Tensor = self.runner(hidden_states=latent, router_logits=logits)
            return out

        return run


def _as_ep(config: Any, ranks: int) -> Any:
    """The parallel configuration of rank 0 of ``ranks`` under expert parallelism, attention replicated as at DP 1."""
    import dataclasses

    return dataclasses.replace(config, ep_size=ranks, ep_rank=0, use_ep=True)


def fill(experts: Any, width: int, released: dict[str, torch.Tensor]) -> None:
    """Copy released-layout weights into vLLM's parameters, padding with code 0 and scale 127."""
    w13, s13 = experts.w13_weight.data, experts.w13_weight_scale.data
    w2, s2 = experts.w2_weight.data, experts.w2_weight_scale.data
    padded = w13.shape[1] // 2
    for t in (w13, w2):
        t.zero_()
    for t in (s13, s2):
        t.fill_(127)
    for half in range(2):
        rows = slice(half * padded, half * padded + width)
        source = slice(half * width, (half + 1) * width)
        w13[:, rows] = released["w13"][:, source]
        s13[:, rows] = released["w13_scale"][:, source]
    w2[:, : case.LATENT, : width // 2] = released["w2"]
    s2[:, : case.LATENT, : width // 32] = released["w2_scale"]
