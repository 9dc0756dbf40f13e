"""What the layers hand to this wheel's kernels passes the kernels' own checks: the suite that every vendor runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

from nvidia_support import VENDOR

from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.kda_metadata import Decode, KdaMetadata
from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu
from k3_core.vllm.testing.ranks import Group, bind_caches, groups
from k3_core.vllm.testing.suite_launch import LaunchSuite

#: Launches of a decoding step, in their order (docs/notes/step-launches.md says what each was before). What vLLM
#: launches for a latent attention itself stands for one.
KDA = ["attn_res", "product", "kda_inputs", "kda_decode", "product"]
MLA = ["attn_res", "product", "low_rank_norms", "product", "attention", "sigmoid_mul", "product"]
DENSE = ["attn_res", "product", "situ", "product"]
EXPERTS = ["logits", "route", "w13", "w2", "combine"]
MOE = ["attn_res", "product", *EXPERTS, "situ", "product", "rms_norm", "product"]
MIX = ["attn_res"]

#: Operations that launch nothing.
FREE = {
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "view", "_unsafe_view", "slice", "split",
    "split_with_sizes", "select", "t", "transpose", "unsqueeze", "squeeze", "as_strided", "expand", "permute", "alias",
    "detach", "reshape", "unbind", "_reshape_alias",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Appends every operation of PyTorch that would launch something to a list of kernel names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.paused = names, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if not self.paused and name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def pause(self, stands_for: str) -> Iterator[None]:
        """One name for all that happens inside."""
        if self.paused:
            yield
            return
        self.names.append(stands_for)
        self.paused = True
        yield
        self.paused = False


class TestLaunch(LaunchSuite):
    vendor, arch = VENDOR, "sm_90"
    prompt_parts = ("attn_res", "conv", "kda_chunk", "kda_output", "norm", "route", "w13", "w2", "combine", "situ")
    step_kernels = frozenset({"kda_decode_kernel", "kda_chunk_kernel", "gated_norm_kernel"})
    verify_kernels = frozenset({"kda_verify_kernel"})

    def test_launches_of_a_decoding_step(
        self, tiny: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tracked figure: every launch of every layer, and no operation of PyTorch between them."""
        names = self.step(tiny, launched, monkeypatch)
        layers = [
            (KDA if self.text.layer_kind(i) == "kda" else MLA) + (MOE if self.text.is_moe_layer(i) else DENSE)
            for i in range(self.text.num_hidden_layers)
        ]
        assert names == [name for layer in layers for name in layer] + MIX

    def test_an_operation_more_is_noticed(
        self, tiny: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from k3_nvidia.kernels import glue

        honest = glue.sigmoid_mul
        monkeypatch.setattr(glue, "sigmoid_mul", lambda x, gate: honest(x + 0, gate))
        assert "add" in self.step(tiny, launched, monkeypatch)

    def as_on_a_gpu(self, model: Any) -> None:
        """Norms, gates and sums by this wheel's kernels."""
        from k3_nvidia.kernels.glue import rms_norm

        for module in model.modules():
            if hasattr(module, "_kernels"):
                module._kernels = True
            if isinstance(module, KdaLayer):  # a CPU build of vLLM keeps its own copy instead
                size = (module.width, module.head_dim)
                module.f_b_proj.weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
            if hasattr(module, "_finish"):
                weight = module.routed_expert_norm.weight
                module._finish.norm = lambda x, w=weight: rms_norm(x, w, 1e-5)
                # as the table of a measured device: the product adds the shared result
                module._finish.add = lambda normed, shared, up=module._finish.up: up(normed)

    def step(self, folder: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Names of what one decoding step of two requests launches."""
        from vllm.forward_context import set_forward_context
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        model = self.make(folder)
        self.text = model.config.text
        self.as_on_a_gpu(model)
        counting = Operations(launched)
        product = UnquantizedLinearMethod.apply

        def apply(method: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            with counting.pause("product"):
                return product(method, layer, x, bias)

        def attention(layer: Any, q: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            with counting.pause("attention"):
                return q.new_zeros(q.shape[0], q.shape[1] * layer.text.v_head_dim)

        monkeypatch.setattr(UnquantizedLinearMethod, "apply", apply)
        monkeypatch.setattr(LatentAttentionOnCpu, "forward", attention)
        bind_caches(model)
        step = KdaMetadata(2, 0, decode=Decode(torch.tensor([1, 2], dtype=torch.int32)))
        metadata: dict[str, Any] = {m.prefix: step for m in model.modules() if isinstance(m, KdaLayer)}
        metadata |= {m.prefix: object() for m in model.modules() if isinstance(m, LatentAttentionOnCpu)}
        hidden = torch.zeros(2, self.text.hidden_size, dtype=torch.bfloat16)
        launched.clear()
        context = set_forward_context(metadata, model.vllm_config, slot_mapping={})
        with groups(Group(), Group()), torch.no_grad(), context, counting:
            model.model(hidden, None)
        return [name.removeprefix("_").removesuffix("_kernel") for name in launched]
