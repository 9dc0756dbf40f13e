"""Writes tiny Kimi K3 checkpoints as ModelSlim would, and the same values as plain bfloat16 beside them.

Scales have few significant bits, so that every value is exact in bfloat16: codes have 4, scales 2, second scales 2.
Nothing here uses the code under test.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3_core.checkpoint import CheckpointReader, tiny_config, write_tiny
from k3_core.checkpoint.tiny import write_json, write_side_files
from k3_core.config import K3Config, load_config

ROUTED = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
SHARED = re.compile(r"\.shared_experts\.(gate|up|down)_proj\.weight$")
#: What test checkpoints store as int8: attention, dense layers, latent projections and, where they are not int4, shared
#: experts. Every second layer, so that int8 and float stand side by side.
INT8 = re.compile(
    r"\.layers\.[024]\..*(self_attn|mlp|shared_experts)\..*_proj(_with_mqa)?\.weight$|routed_expert_up_proj"
)
GROUP = 256


def plain_config() -> K3Config:
    """Five layers, experts of two groups, no quantization_config (ModelSlim removes it)."""
    raw = tiny_config("k3", moe_intermediate_size=512, routed_expert_hidden_size=512).to_dict()
    raw.pop("quantization_config", None)
    raw.get("text_config", {}).pop("quantization_config", None)
    return load_config(raw)


@dataclass
class Written:
    """A ModelSlim checkpoint, the plain one of the same values, and what is in the former (to be changed by tests)."""

    folder: Path
    plain: Path
    config: K3Config
    description: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path | None = None) -> Path:
        """Write the tensors in two files with an index of ModelSlim's name, and the description."""
        folder = folder or self.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_side_files(folder, self.config)
        names = list(self.tensors)
        weight_map = {}
        for index, part in enumerate((names[::2], names[1::2])):
            file = f"quant_model_weights-{index + 1:05d}-of-00002.safetensors"
            save_file({name: self.tensors[name].contiguous() for name in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        write_json(folder / "quant_model_weights.safetensors.index.json", {"weight_map": weight_map})
        (folder / "quant_model_description.json").write_text(json.dumps(self.description))
        return folder


def write(root: Path, *, packed: bool = True, group: int = 0, shared: bool = True, int8: bool = False) -> Written:
    """Quantise the experts of a random plain checkpoint (``int8``: other layers too); both folders below ``root``."""
    config = plain_config()
    source = write_tiny(root / "source", config, seed=3)
    result = Written(root / "modelslim", root / "plain", config)
    result.description = {"model_quant_type": "W4A8_DYNAMIC", "metadata": {}}
    if packed:
        result.description |= {"version": "1.0.0", "group_size": group}
    plain = {}
    for name, tensor in CheckpointReader(source).tensors(copy=True):
        stem = name.removesuffix("weight")
        if int8 and INT8.search(name) and not (shared and SHARED.search(name)):
            parts, values = quantise_int8(tensor.float())
            plain[name] = values.to(torch.bfloat16)
            assert torch.equal(plain[name].float(), values), "the values must be exact in bfloat16"
            for kind, part in parts.items():
                result.tensors[stem + kind] = part
                result.description[stem + kind] = "W8A8_DYNAMIC"
            continue
        if not (ROUTED.search(name) or (shared and SHARED.search(name))):
            plain[name] = result.tensors[name] = tensor
            result.description[name] = "FLOAT"
            continue
        parts, values = quantise(tensor.float(), name, packed, group)
        plain[name] = values.to(torch.bfloat16)
        assert torch.equal(plain[name].float(), values), "the values must be exact in bfloat16"
        for kind, part in parts.items():
            result.tensors[stem + kind] = part
            result.description[stem + kind] = "W4A8_DYNAMIC"
    result.plain.mkdir()
    write_side_files(result.plain, config)
    save_file(plain, result.plain / "model.safetensors")
    result.save()
    return result


def quantise(weight: Tensor, name: str, packed: bool, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """(ModelSlim's tensors by kind, the values they stand for) of one matrix [N, K]."""
    rows, columns = weight.shape
    scale = _short(weight.abs().amax(1, keepdim=True) / 7)
    parts = {"weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    step = scale
    if group:
        ratio = weight.abs().unflatten(1, (-1, group)).amax(-1) / 7 / scale
        parts["weight_scale_second"] = _short(ratio)
        parts["weight_offset_second"] = torch.zeros(rows, columns // group, dtype=torch.int64)
        step = (scale * parts["weight_scale_second"]).repeat_interleave(group, dim=1)
    codes = (weight / step).round().clamp(-8, 7)
    values = codes * step
    parts["weight"] = codes.to(torch.int8)
    if packed:
        parts["weight"] = pack_rows(parts["weight"])
        slices = 16 if name.endswith(("w2.weight", "down_proj.weight")) else 1
        parts["scale_bias"] = 8 * values.unflatten(1, (slices, -1)).sum(-1)
    return parts, values


def quantise_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same for int8 with a scale a row, which is a power of two: the codes have as many bits as bfloat16."""
    _, exponent = torch.frexp(weight.abs().amax(1, keepdim=True) / 127)
    scale = torch.ldexp(torch.ones_like(weight[:, :1]), exponent)
    codes = (weight / scale).round()
    parts = {"weight": codes.to(torch.int8), "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    return parts, codes * scale


def pack_rows(codes: Tensor) -> Tensor:
    """[N, K] -> [N / 2, K]: the even row in the low nibble."""
    return (codes[0::2] & 15) | (codes[1::2] << 4)


def swap_nibbles(packed: Tensor) -> Tensor:
    """The odd row in the low nibble: another order than the format's."""
    return ((packed >> 4) & 15) | (packed << 4)


def _short(values: Tensor) -> Tensor:
    """Rounded up to 2 significant bits (1 or 1.5 times a power of two), so that no code leaves its range."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 4).ceil() / 4, exponent)
