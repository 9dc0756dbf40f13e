"""Building the Ascend model on the fake device: vLLM and vllm-ascend are real, CANN is a set of stand-ins.

torch_npu believes in one Ascend910B3 (ci/ascend). Tensors on ``npu:0`` exist as FakeTensors only; real tensors live on
the CPU. One model a process: vllm-ascend keeps process-wide state.
"""

from __future__ import annotations

import collections
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def has_vllm_ascend() -> bool:
    """Whether this environment has torch_npu and vllm-ascend."""
    import importlib.util

    return all(importlib.util.find_spec(name) for name in ("torch_npu", "vllm_ascend"))


def has_npu() -> bool:
    """Whether a real NPU is here: a computation gives its result."""
    if not has_vllm_ascend():
        return False
    try:
        import torch_npu  # noqa: F401

        return float((torch.ones(4, device="npu") + 1).sum().cpu()) == 8.0
    except Exception:
        return False


def fake_device() -> None:
    """Let torch_npu's Python half answer without asking the stand-ins; idempotent. A real NPU answers for itself."""
    import torch_npu

    if has_npu():
        return
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    for module in (torch.npu, torch_npu.npu):
        module.current_device = lambda: 0
        module.set_device = lambda *_: None
        module.is_available = lambda: True
        module.device_count = lambda: 1
        module.synchronize = lambda *_: None


def plugins() -> None:
    """vllm-ascend's patches as its workers apply them, and our registration."""
    from vllm.platforms import current_platform

    assert current_platform.device_type == "npu"
    from vllm_ascend.utils import adapt_patch

    adapt_patch(True)
    adapt_patch()
    from k3_ascend import plugin
    from k3_core.vllm import registration

    plugin.register()
    active = registration.active()
    assert active is not None
    assert active.name == "k3-ascend"


def settle(checkpoint: Path, **options: Any) -> Any:
    """vLLM's configuration, as the server makes it before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"model": str(checkpoint), "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8}
    return EngineArgs(**{**defaults, **options}).create_engine_config()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def worker(vllm_config: Any, rank: int = 0, port: int = 0) -> Iterator[None]:
    """What vllm-ascend's worker sets up before it builds a model, over gloo; ranks of one group share a port."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm_ascend.ascend_config import get_ascend_config, init_ascend_config
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
    from vllm_ascend.utils import register_ascend_customop, set_weight_prefetch_method

    with set_current_vllm_config(vllm_config):
        register_ascend_customop(vllm_config)
        if not parallel_state.model_parallel_is_initialized():
            size = vllm_config.parallel_config.tensor_parallel_size
            init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port or free_port()}", 0, "gloo")
            initialize_model_parallel(size, 1, backend="gloo")
            init_ascend_config(vllm_config)
            init_ascend_model_parallel(vllm_config.parallel_config)
        set_weight_prefetch_method(get_ascend_config().weight_prefetch_config)
        yield


def build(vllm_config: Any, device: str = "cpu") -> Any:
    """The model that vLLM resolves for this configuration, with its dtype as default."""
    from vllm.model_executor.models.registry import ModelRegistry

    kind, _ = ModelRegistry.resolve_model_cls(vllm_config.model_config.architectures, vllm_config.model_config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device(device):
            return kind(vllm_config=vllm_config)
    finally:
        torch.set_default_dtype(before)


def to_fake(model: torch.nn.Module) -> None:
    """Replace parameters and buffers by FakeTensors on ``npu:0`` (inside a FakeTensorMode)."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="npu:0")
                replacement = torch.nn.Parameter(fake, requires_grad=False)
                replacement.__dict__.update(parameter.__dict__)
                module._parameters[name] = replacement
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                fake = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="npu:0")
                module._buffers[name] = fake
                if hasattr(module, "store"):
                    setattr(module.store, name, fake)  # experts compute on their store's tensors


@dataclass
class Census(TorchDispatchMode):
    """Counts and keeps the calls of operators outside aten."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.name.startswith(("aten::", "prim::", "prims::")):
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def counts(self) -> collections.Counter[str]:
        """Calls by ``namespace::name``."""
        return collections.Counter(func._schema.name for func, _, _ in self.calls)


@contextmanager
def forward_context(vllm_config: Any, tokens: int, metadata: Any = None, *, profile: bool = False) -> Iterator[None]:
    """vllm-ascend's forward context of a step."""
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    with set_ascend_forward_context(metadata, vllm_config, num_tokens=tokens, in_profile_run=profile), nullcontext():
        yield


BLOCK = 128


class _Torch:
    """torch, but for the dtype that vllm-ascend's prefill converts to."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _unrounded_prefill(dtype: torch.dtype) -> None:
    """In fp32, lift the rounding of attention inputs to bfloat16, which vllm-ascend does for its kernel's sake."""
    from vllm_ascend.attention import mla_v1

    mla_v1.torch = _Torch() if dtype == torch.float32 else torch


class Steps:
    """Engine steps on CPU tensors: the real metadata builders, caches bound as vLLM's runner binds them.

    Requests keep their place; each has one state slot (from 1) and its own latent pages.
    """

    def __init__(self, model: Any, vllm_config: Any, requests: int = 4) -> None:
        from k3_ascend import state_copy
        from k3_ascend.kda import KimiDeltaAttention
        from k3_ascend.mla import LatentAttention
        from k3_ascend.state_copy.compiler import ContractCompiler

        self.model, self.config, self.requests = model, vllm_config, requests
        self.text = model.config.text
        dtype = vllm_config.model_config.dtype
        pages = 1 + requests * -(-vllm_config.model_config.max_model_len // BLOCK)
        self.latent = [m for m in model.modules() if isinstance(m, LatentAttention)]
        self.recurrent = {m.prefix: m for m in model.modules() if isinstance(m, KimiDeltaAttention)}
        for layer in self.latent:
            widths = (self.text.kv_lora_rank, self.text.qk_rope_head_dim)
            layer.attn.kv_cache = tuple(torch.full((pages, BLOCK, 1, w), float("nan"), dtype=dtype) for w in widths)
        for layer in self.recurrent.values():
            shapes = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
            # Slots hold another request's leftovers; the null block stays as it is.
            layer.kv_cache = [torch.full((requests + 1, *shape), float("nan"), dtype=kind) for shape, kind in shapes]
        _unrounded_prefill(dtype)
        from vllm_ascend.ops.rotary_embedding import set_cos_and_sin

        set_cos_and_sin(vllm_config, requests, 1, dtype, torch.device("cpu"))  # as the runner does
        state_copy.initialise(
            self.recurrent, max_num_seqs=requests, compiler=ContractCompiler(), generation=lambda _: "910B"
        )
        self.lengths = [0] * requests
        self._builders = self._make_builders()

    def _make_builders(self) -> tuple[Any, Any]:
        from vllm.v1.kv_cache_interface import MLAAttentionSpec
        from vllm_ascend.attention.mla_v1 import AscendMLAMetadataBuilder

        from k3_ascend.kda import AscendKdaMetadataBuilder

        device = torch.device("cpu")
        spec = MLAAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=self.text.kv_lora_rank + self.text.qk_rope_head_dim,
            dtype=self.config.model_config.dtype,
        )
        latent = AscendMLAMetadataBuilder(spec, [m.attention_name for m in self.latent], self.config, device)
        first = next(iter(self.recurrent.values()))
        recurrent = AscendKdaMetadataBuilder(
            first.get_kv_cache_spec(self.config), list(self.recurrent), self.config, device
        )
        return latent, recurrent

    def step(self, tokens: list[list[int]], images: dict[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Logits [n, vocab] of each request's new tokens; requests are 0 .. len(tokens) - 1, decodes first.

        images: pixel_values and grid_thws of the pictures whose placeholders the tokens have, in their order.
        """
        bounds = torch.tensor([0, *torch.tensor([len(t) for t in tokens]).cumsum(0).tolist()], dtype=torch.int32)
        metadata = self._metadata(tokens, bounds)
        ids = torch.tensor([i for t in tokens for i in t])
        with torch.no_grad(), forward_context(self.config, len(ids), metadata):
            embedded = self.model.embed_input_ids(ids)
            if images is not None:
                embedded = self.model.embed_input_ids(
                    ids,
                    self.model.embed_multimodal(**images),
                    is_multimodal=ids == self.model.config.media_placeholder_token_id,
                )
            hidden = self.model(None, None, inputs_embeds=embedded)
            self.hidden = hidden
            text = self.model.get_language_model() if hasattr(self.model, "get_language_model") else self.model
            logits = torch.nn.functional.linear(text.model.norm(hidden), text.lm_head.weight).float()
        for request, new in enumerate(tokens):
            self.lengths[request] += len(new)
        return [logits[a:b, : self.text.vocab_size] for a, b in pairwise(bounds.tolist())]

    def prefill(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """All prompts whole, in one step."""
        return self.step(prompts)

    def decode(self, tokens: list[int]) -> list[torch.Tensor]:
        """One token a request."""
        return [logits[0] for logits in self.step([[t] for t in tokens])]

    def _metadata(self, tokens: list[list[int]], bounds: torch.Tensor) -> dict[str, Any]:
        from vllm_ascend.attention.attention_v1 import AscendAttentionState
        from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

        rows = len(tokens)
        new = torch.tensor([len(t) for t in tokens], dtype=torch.int32)
        computed = torch.tensor(self.lengths[:rows], dtype=torch.int32)
        seq_lens = computed + new
        per_request = -(-self.config.model_config.max_model_len // BLOCK)
        table = 1 + torch.arange(rows * per_request, dtype=torch.int32).view(rows, per_request)
        positions = torch.cat([torch.arange(int(c), int(s)) for c, s in zip(computed, seq_lens, strict=True)])
        owner = torch.repeat_interleave(torch.arange(rows), new.long())
        slots = table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        decoding = bool((computed > 0).all())
        common = AscendCommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=computed,
            num_reqs=rows,
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(new.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=table,
            slot_mapping=slots.to(torch.int32),
            positions=positions,
            attn_state=AscendAttentionState.DecodeOnly if decoding else AscendAttentionState.PrefillNoCache,
            num_input_tokens=int(bounds[-1]),
            is_prefilling=computed == 0,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        latent, recurrent = self._builders
        of_latent = latent.build(0, common)
        common.block_table_tensor = torch.arange(1, rows + 1, dtype=torch.int32).view(rows, 1)
        of_recurrent = recurrent.build(0, common)
        result = {layer.attention_name: of_latent for layer in self.latent}
        return result | dict.fromkeys(self.recurrent, of_recurrent)


def wide_config() -> Any:
    """A 5-layer Kimi K3 whose experts are wide enough for every form of their weights."""
    from k3_core.checkpoint.tiny_config import tiny_config

    return tiny_config("k3", moe_intermediate_size=256, routed_expert_hidden_size=256)


def kernel_config() -> Any:
    """A 5-layer Kimi K3 whose head sizes are those of the released one, as attention operators on an NPU demand."""
    from k3_core.checkpoint.tiny_config import layer_lists, tiny_config

    return tiny_config(
        "k3",
        linear_attn_config={
            "num_heads": 8,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            **layer_lists(5),
        },
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=256,
        routed_expert_hidden_size=256,
    )


def load(model: Any, vllm_config: Any) -> set[str]:
    """Weights through vLLM's default loader, then what vLLM does with attention layers."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(vllm_config.load_config)
    names: set[str] = model.load_weights(loader.get_all_weights(vllm_config.model_config, model))
    for module in model.modules():
        if isinstance(module, MLAAttention) and _has_cpu_operators():
            module.process_weights_after_loading(vllm_config.model_config.dtype)
    return names


def _has_cpu_operators() -> bool:
    """Whether reference implementations are registered for CPU tensors."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_format_cast", "CPU")
