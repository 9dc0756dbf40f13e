"""From a checkpoint folder to `ModelWeights`: one tensor at a time, experts straight into their stacked buffers.

dtype rule: a tensor stored F32 stays F32 (F64 in an fp64 model), everything else takes the dtype of the model. Routed
experts are unpacked to it, or keep their MXFP4 bytes where `packed` is asked for.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from k3_core.checkpoint import CheckpointReader, normalize_a_log
from k3_core.checkpoint.table import text_prefix
from k3_core.config import K3Config
from k3_core.contracts.mla import MlaWeights
from k3_core.contracts.moe import DenseExperts, Experts, MoeWeights, PackedExperts
from k3_core.contracts.mxfp4 import unpack
from k3_core.contracts.vision import BlockWeights, ProjectorWeights, TowerWeights
from k3_core.errors import CheckpointError, UnsupportedError
from k3_core.reference.weights import KdaWeights, LayerWeights, MixWeights, MlpWeights, ModelWeights

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.w([123])\.(weight|weight_packed|weight_scale)$")


def read_weights(
    path: str | Path, config: K3Config, dtype: torch.dtype, device: torch.device, packed: bool = False
) -> ModelWeights:
    """Verify and read the checkpoint at `path`. Raises CheckpointError before any weight is read, see its reader."""
    return assemble(CheckpointReader(path, config).tensors(), config, dtype, device, packed)


def assemble(
    tensors: Iterable[tuple[str, Tensor]],
    config: K3Config,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = False,
) -> ModelWeights:
    """Group verified (released name, tensor) pairs, in any order, into weights on `device`; the tensors are copied."""
    if dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise UnsupportedError(f"the reference model runs in float64, float32 or bfloat16, not {dtype}")
    if packed and config.quantization is None:
        raise UnsupportedError("packed_experts needs MXFP4 experts, but this checkpoint's experts are not quantised")
    store = _Store(config, dtype, device, packed)
    for name, tensor in tensors:
        store.add(name, tensor)
    return _model(store, config)


class _Store:
    """Tensors by released name in their final dtype and place; experts by the name of their layer's block."""

    def __init__(self, config: K3Config, dtype: torch.dtype, device: torch.device, packed: bool) -> None:
        self.config, self.dtype, self.device, self.packed = config, dtype, device, packed
        self.plain: dict[str, Tensor] = {}
        self.experts: dict[str, dict[str, Tensor]] = {}
        self._half_read: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        match = _EXPERT.fullmatch(name)
        if match is None:
            if name.endswith(".A_log"):
                tensor = normalize_a_log(tensor, self.config.text.linear_attn.num_heads, name)
            wide = tensor.dtype == torch.float32 and self.dtype == torch.bfloat16
            # A copy even where nothing changes: the reader's tensors are views of the file.
            self.plain[name] = tensor.to(self.device, tensor.dtype if wide else self.dtype, copy=True)
            return
        block, expert, part, kind = match[1], int(match[2]), int(match[3]), match[4]
        if kind == "weight" or self.packed:
            self._put(block, expert, part, "_scale" if kind == "weight_scale" else "", tensor)
            return
        # Bytes and scales arrive in any order; the pair is unpacked as soon as it is complete.
        pair = self._half_read.setdefault(f"{block}.{expert}.{part}", {})
        pair[kind] = tensor.to(self.device)
        if len(pair) == 2:
            self._put(block, expert, part, "", unpack(pair["weight_packed"], pair["weight_scale"], self.dtype))
            del self._half_read[f"{block}.{expert}.{part}"]

    def _put(self, block: str, expert: int, part: int, suffix: str, tensor: Tensor) -> None:
        """Copy one matrix into the stacked buffer: w13 has w1 (gate) over w3 (up)."""
        stacks = self.experts.setdefault(block, {})
        key = ("w2" if part == 2 else "w13") + suffix
        rows, columns = tensor.shape
        if key not in stacks:
            height = rows if part == 2 else 2 * rows
            dtype = torch.uint8 if tensor.dtype == torch.uint8 else self.dtype
            stacks[key] = torch.empty(self.config.text.num_experts, height, columns, dtype=dtype, device=self.device)
        start = rows if part == 3 else 0
        stacks[key][expert, start : start + rows] = tensor.to(stacks[key].dtype)

    def take(self, name: str) -> Tensor:
        try:
            return self.plain[name]
        except KeyError:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint") from None

    def take_experts(self, block: str) -> Experts:
        stacks = self.experts.get(block)
        if stacks is None:
            raise CheckpointError(f"the experts of {block} are missing from the checkpoint")
        if self.packed:
            return PackedExperts(stacks["w13"], stacks["w13_scale"], stacks["w2"], stacks["w2_scale"])
        return DenseExperts(stacks["w13"], stacks["w2"])


def _model(store: _Store, config: K3Config) -> ModelWeights:
    text, prefix = config.text, text_prefix(config)
    embed = store.take(f"{prefix}model.embed_tokens.weight")
    has_mix = text.attn_res_block_size is not None
    vision = config.vision is not None
    return ModelWeights(
        embed=embed,
        layers=tuple(_layer(store, config, i, f"{prefix}model.layers.{i}.") for i in range(text.num_hidden_layers)),
        output_mix=_mix(store, f"{prefix}model.output_attn_res") if has_mix else None,
        norm=store.take(f"{prefix}model.norm.weight"),
        lm_head=embed if text.tie_word_embeddings else store.take(f"{prefix}lm_head.weight"),
        tower=_tower(store, config) if vision else None,
        projector=_projector(store, config) if vision else None,
    )


def _layer(store: _Store, config: K3Config, index: int, prefix: str) -> LayerWeights:
    text = config.text
    has_mix = text.attn_res_block_size is not None
    kda = text.layer_kind(index) == "kda"
    attention = _kda(store, config, prefix + "self_attn.") if kda else _mla(store, config, prefix + "self_attn.")
    moe = text.is_moe_layer(index)
    return LayerWeights(
        attention_mix=_mix(store, prefix + "self_attention_res") if has_mix else None,
        input_norm=store.take(prefix + "input_layernorm.weight"),
        attention=attention,
        mlp_mix=_mix(store, prefix + "mlp_res") if has_mix else None,
        post_norm=store.take(prefix + "post_attention_layernorm.weight"),
        mlp=_moe(store, config, prefix + "block_sparse_moe") if moe else MlpWeights(*_mlp(store, prefix + "mlp.")),
    )


def _kda(store: _Store, config: K3Config, prefix: str) -> KdaWeights:
    gate = ("g_proj",) if config.text.linear_attn.use_full_rank_gate else ("g_a_proj", "g_b_proj")
    q, k, v, f_a, f_b, b, o = (
        store.take(f"{prefix}{name}_proj.weight") for name in ("q", "k", "v", "f_a", "f_b", "b", "o")
    )
    return KdaWeights(
        q=q,
        k=k,
        v=v,
        conv=torch.cat([store.take(f"{prefix}{part}_conv1d.weight").squeeze(1) for part in "qkv"]),
        f_a=f_a,
        f_b=f_b,
        b=b,
        a_log=store.take(prefix + "A_log"),
        dt_bias=store.take(prefix + "dt_bias"),
        o_norm=store.take(prefix + "o_norm.weight"),
        gate=tuple(store.take(f"{prefix}{name}.weight") for name in gate),
        o=o,
    )


def _mla(store: _Store, config: K3Config, prefix: str) -> MlaWeights:
    low_rank = config.text.q_lora_rank is not None
    return MlaWeights(
        q_a=store.take(prefix + "q_a_proj.weight") if low_rank else None,
        q_a_norm=store.take(prefix + "q_a_layernorm.weight") if low_rank else None,
        q_b=store.take(prefix + ("q_b_proj.weight" if low_rank else "q_proj.weight")),
        kv_a=store.take(prefix + "kv_a_proj_with_mqa.weight"),
        kv_a_norm=store.take(prefix + "kv_a_layernorm.weight"),
        kv_b=store.take(prefix + "kv_b_proj.weight"),
        g=store.take(prefix + "g_proj.weight") if config.text.mla_use_output_gate else None,
        o=store.take(prefix + "o_proj.weight"),
    )


def _moe(store: _Store, config: K3Config, block: str) -> MoeWeights:
    text = config.text
    latent = text.routed_expert_hidden_size is not None
    shared = _mlp(store, block + ".shared_experts.") if text.num_shared_experts else (None, None, None)
    return MoeWeights(
        router=store.take(block + ".gate.weight"),
        bias=store.take(block + ".gate.e_score_correction_bias"),
        experts=store.take_experts(block),
        down=store.take(block + ".routed_expert_down_proj.weight") if latent else None,
        norm=store.take(block + ".routed_expert_norm.weight") if latent and text.latent_moe_use_norm else None,
        up=store.take(block + ".routed_expert_up_proj.weight") if latent else None,
        shared_gate=shared[0],
        shared_up=shared[1],
        shared_down=shared[2],
    )


def _mlp(store: _Store, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (store.take(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
    return gate, up, down


def _mix(store: _Store, prefix: str) -> MixWeights:
    return MixWeights(store.take(prefix + "_norm.weight"), store.take(prefix + "_proj.weight"))


def _tower(store: _Store, config: K3Config) -> TowerWeights:
    vision = config.vision
    assert vision is not None
    prefix = "vision_tower.encoder."
    parts = ("norm0", "wqkv", "wo", "norm1", "mlp.fc0", "mlp.fc1")
    blocks = [
        BlockWeights(*(store.take(f"{prefix}blocks.{i}.{part}.weight") for part in parts))
        for i in range(vision.vt_num_hidden_layers)
    ]
    return TowerWeights(
        patch_proj=store.take("vision_tower.patch_embed.proj.weight"),
        pos_emb=store.take("vision_tower.patch_embed.pos_emb.weight"),
        blocks=blocks,
        final_layernorm=store.take(prefix + "final_layernorm.weight"),
        num_heads=vision.vt_num_attention_heads,
    )


def _projector(store: _Store, config: K3Config) -> ProjectorWeights:
    assert config.vision is not None
    names = ("proj.0", "proj.2", "post_norm")
    linear_1, linear_2, post_norm = (store.take(f"mm_projector.{name}.weight") for name in names)
    return ProjectorWeights(linear_1, linear_2, post_norm, config.vision.projector_ln_eps)
