"""Checkpoints that ModelSlim quantised to W4A8: which tensors there are, which of them this wheel takes, their values.

``quant_model_description.json`` gives every stored tensor a type by its name, beside ``version`` and ``group_size``. An
int4 matrix [N, K] has, beside the name of its float weight (``…w1.weight``):

    weight                int8  [N / 2, K]    version 1.0.0: rows 2i (low nibble) and 2i + 1 (high) share a byte
                          int8  [N, K]        without a version: a code a byte
    weight_scale          fp32  [N, 1]
    weight_offset         fp32  [N, 1]        zero: the scheme is symmetric
    weight_scale_second   fp32  [N, K / g]    with groups of g = ``group_size`` inputs; value = code * scale * second
    weight_offset_second  int64 [N, K / g]    zero
    scale_bias            fp32  [N, 1]        version 1.0.0: 8 * sum_k value; where inputs are cut over ranks (w2,
                                [N, 16]       down_proj) in 16 slices of K

An int8 matrix (W8A8_DYNAMIC) has weight int8 [N, K], weight_scale and weight_offset as above; value = code * scale. It
is a linear layer outside the routed experts, and becomes bfloat16 while it is read: activations stay bfloat16, too.

Read in the sources of vllm-ascend 0.23 (quantization/methods/w4a8.py) and of msModelSlim (its ``ascendv1`` saver, per
channel, and its older saver, per group); no such checkpoint of Kimi K3 was seen. ``scale_bias`` is not used but
recomputed, as vllm-ascend does without a version, from the scales that the product uses; the stored one is compared,
which finds codes in another order.

What the sources leave open is refused: other versions, group sizes but 0 and 256 (vllm-ascend's default), and every
type but W4A8_DYNAMIC for routed experts, that or W8A8_DYNAMIC or FLOAT for shared ones, and the last two for the other
linear layers. Static W8A8 has no scale of its weights in the file, only its product with that of the activations.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_ascend.experts import W4A8
from k3_ascend.generation import Generation
from k3_core.checkpoint import Manifest, Shard, TensorSpec, Topology, canonical_name, shard_plan, tensor_table
from k3_core.checkpoint.headers import read_header
from k3_core.checkpoint.verify import verify_headers
from k3_core.config import K3Config
from k3_core.errors import CheckpointError, ConfigError

DESCRIPTION = "quant_model_description.json"
INT4, INT8, FLOAT = "W4A8_DYNAMIC", "W8A8_DYNAMIC", "FLOAT"
VERSION = "1.0.0"
GROUP = 256
#: Slices of K that a cut matrix's ``scale_bias`` has.
SLICES = 16
SHOWN = 3

_ROUTED = re.compile(r"\.block_sparse_moe\.experts\.\d+\.w([123])\.weight$")
_SHARED = re.compile(r"\.block_sparse_moe\.shared_experts\.(gate|up|down)_proj\.weight$")
#: Linear layers that may be int8: attention, dense and shared feed-forward, the latent's projections.
_LINEAR = re.compile(
    r"\.layers\.\d+\.(self_attn|mlp|block_sparse_moe\.shared_experts)\.\w+_proj(_with_mqa)?\.weight$"
    r"|\.block_sparse_moe\.routed_expert_(down|up)_proj\.weight$"
)
INT8_KINDS = ("weight", "weight_scale", "weight_offset")
#: Keys of the description that switch on what is not built here.
_FEATURES = ("kv_cache_type", "kv_quant_type", "fa_quant_type", "indexer_quant_type")


@dataclass(frozen=True)
class Layout:
    """How int4 matrices are stored: two codes a byte, inputs a scale (0: a scale a channel), shared experts too.

    int8: released names of the weights that are stored as int8.
    """

    packed: bool
    group: int
    shared: bool
    int8: frozenset[str] = frozenset()

    def __str__(self) -> str:
        scale = f"a scale {self.group} inputs" if self.group else "a scale a channel"
        also = f", {len(self.int8)} int8 matrices as bfloat16" if self.int8 else ""
        return f"{scale}, shared experts {'too' if self.shared else 'not'}{also}"

    def kinds(self) -> tuple[str, ...]:
        """What each int4 matrix has."""
        return (
            *("weight", "weight_scale", "weight_offset"),
            *(("weight_scale_second", "weight_offset_second") if self.group else ()),
            *(("scale_bias",) if self.packed else ()),
        )

    def is_int4(self, name: str) -> bool:
        """Whether the weight of this released name is stored as int4."""
        return bool(_ROUTED.search(name) or (self.shared and _SHARED.search(name)))


def _cuts_inputs(name: str) -> bool:
    """Whether tensor parallelism cuts this expert matrix along its inputs."""
    return name.endswith((".w2.weight", ".down_proj.weight"))


# ---------------------------------------------------------------------------------------------------------- description


def description(model: str, revision: str | None = None) -> Mapping[str, Any] | None:
    """The description of a checkpoint (a folder, or a name on the hub), or None where it has none.

    Raises CheckpointError for a file that is not a JSON object.
    """
    path = Path(model) / DESCRIPTION
    try:
        if Path(model).is_dir():
            raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        else:
            from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

            raw = get_hf_file_to_dict(DESCRIPTION, model, revision)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    if raw is not None and not isinstance(raw, Mapping):
        raise CheckpointError(f"{path}: expected an object that gives each tensor a type")
    return raw


@functools.lru_cache(maxsize=2)
def of_checkpoint(model: str, revision: str | None, config: K3Config) -> Layout | None:
    """The layout of a folder or a name on the hub, or None for one that ModelSlim did not make; read once.

    Raises CheckpointError as :func:`layout` does.
    """
    described = description(model, revision)
    return None if described is None else layout(described, config)


def of_model(model_config: Any, config: K3Config) -> Layout | None:
    """:func:`of_checkpoint` of vLLM's ``model_config``."""
    return of_checkpoint(str(model_config.model), model_config.revision, config)


def layout(described: Mapping[str, Any], config: K3Config) -> Layout:
    """Check a description against the tensors of ``config`` and say how int4 matrices are stored.

    Raises CheckpointError naming the tensors whose type is missing or not one that is read here.
    """
    packed, group = _format(described, config)
    types = {canonical_name(name, config): kind for name, kind in described.items() if isinstance(kind, str)}
    weights = [name for name in tensor_table(config) if name.endswith(".weight")]
    shared = any(types.get(name) == INT4 for name in weights if _SHARED.search(name))
    int8 = frozenset(
        name
        for name in weights
        if types.get(name) == INT8 and _LINEAR.search(name) and not (shared and _SHARED.search(name))
    )
    result = Layout(packed, group, shared, int8)
    wrong: dict[str, list[str]] = {}
    for name in tensor_table(config):
        wanted = INT4 if result.is_int4(name) else INT8 if name in int8 else FLOAT
        found = types.get(name)
        # Small tensors are not always described; a matrix of experts must be.
        if found != wanted and not (found is None and wanted == FLOAT):
            wrong.setdefault(_advice(wanted, result), []).append(f"{name} is {found or 'not described'}")
    if wrong:
        raise CheckpointError(
            f"{DESCRIPTION}: " + " ".join(f"{_shown(names)}. {advice}." for advice, names in wrong.items())
        )
    return result


def _shown(names: list[str]) -> str:
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def _advice(wanted: str, found: Layout) -> str:
    if wanted == INT4:
        also = ", and the shared ones of all layers or of none" if found.shared else ""
        return f"Every routed expert's w1, w2 and w3 must be {INT4}{also}: quantise them again"
    return (
        f"k3-ascend reads {INT4} experts, {INT8} linear layers of attention, dense and shared feed-forward and the "
        f"latent, and {FLOAT} for every other tensor: quantise again and leave these layers out"
    )


def _format(described: Mapping[str, Any], config: K3Config) -> tuple[bool, int]:
    """(two codes a byte, inputs a scale). Raises CheckpointError for what the vendor's sources do not define."""
    if config.quantization is not None:
        raise CheckpointError(f"{DESCRIPTION}: config.json has quantization_config too; ModelSlim removes it, do so")
    version, group = described.get("version"), described.get("group_size", GROUP)
    if version not in (None, VERSION):
        raise CheckpointError(f"{DESCRIPTION}: version {version!r} is not known here, only {VERSION!r} or none")
    allowed = (0, GROUP) if version else (GROUP,)
    if type(group) is not int or group not in allowed:
        known = " or ".join(map(str, allowed))
        raise CheckpointError(f"{DESCRIPTION}: group_size {group!r} with version {version!r}: only {known} is read")
    features = [name for name in _FEATURES if described.get(name)]
    metadata = described.get("metadata")
    features += [f"metadata.{name}" for name in (metadata if isinstance(metadata, Mapping) else ())]
    if features:
        raise CheckpointError(f"{DESCRIPTION}: {', '.join(features)} is not supported; quantise without it")
    return version == VERSION, group


def reasons(found: Layout, config: K3Config, topology: Topology, want: str | None, where: Generation) -> Iterator[str]:
    """Why such a checkpoint cannot be served so: the form asked for, the generation, sizes that do not divide."""
    if want not in (None, "w4a8"):
        yield f"k3_experts {want!r}: the checkpoint's experts are int4 (ModelSlim), leave k3_experts out"
    if where not in (Generation.A2, Generation.A3):
        yield f"int4 experts (ModelSlim) are for A2 and A3, this is {where.value}"
    text, tp = config.text, topology.tp_size
    sizes = {"routed": (text.expert_hidden_size, text.moe_intermediate_size // (1 if topology.ep_size > 1 else tp))}
    if found.shared:
        sizes["shared"] = (text.hidden_size, text.shared_intermediate_size // tp)
    unit = found.group or 8
    for name, widths in sizes.items():
        if any(width % unit for width in widths):
            yield f"{name} experts of widths {widths} a rank: int4 needs multiples of {unit}; use fewer ranks"
    cut = found.shared or topology.ep_size == 1
    if found.packed and cut and SLICES % tp:
        yield f"ModelSlim stores scale_bias in {SLICES} slices, which {tp} ranks do not divide; use 1, 2, 4, 8 or 16"


# -------------------------------------------------------------------------------------------------------------- tensors


def table(config: K3Config, found: Layout) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of every tensor of the checkpoint."""
    result: dict[str, TensorSpec] = {}
    for name, spec in tensor_table(config).items():
        stem = name.removesuffix("weight")
        if name in found.int8:
            column = TensorSpec((spec.shape[0], 1), torch.float32)
            result |= {name: TensorSpec(spec.shape, torch.int8)} | {stem + kind: column for kind in INT8_KINDS[1:]}
            continue
        if not found.is_int4(name):
            result[name] = spec
            continue
        rows, columns = spec.shape
        groups = columns // found.group if found.group else 0
        specs = {
            "weight": TensorSpec((rows // 2 if found.packed else rows, columns), torch.int8),
            "weight_scale": TensorSpec((rows, 1), torch.float32),
            "weight_offset": TensorSpec((rows, 1), torch.float32),
            "weight_scale_second": TensorSpec((rows, groups), torch.float32),
            "weight_offset_second": TensorSpec((rows, groups), torch.int64),
            "scale_bias": TensorSpec((rows, SLICES if _cuts_inputs(name) else 1), torch.float32),
        }
        result |= {stem + kind: specs[kind] for kind in found.kinds()}
    return result


def plan(config: K3Config, found: Layout, topology: Topology) -> dict[str, Shard]:
    """Name -> this rank's part: each tensor of an int4 matrix is cut where the float matrix would be."""
    result: dict[str, Shard] = {}
    float_table = tensor_table(config)
    for name, shard in shard_plan(config, topology).items():
        stem = name.removesuffix("weight")
        if name in found.int8:
            scale = shard if shard.is_empty or shard.dim == 0 else Shard()
            result |= {name: shard} | {stem + kind: scale for kind in INT8_KINDS[1:]}
            continue
        if not found.is_int4(name):
            result[name] = shard
            continue
        columns = float_table[name].shape[1]
        for kind in found.kinds():
            result[stem + kind] = _part(shard, kind, columns, found)
    return result


def _part(shard: Shard, kind: str, columns: int, found: Layout) -> Shard:
    """The part of one tensor of a matrix [N, K = columns] of which this rank has ``shard``."""
    if shard.is_whole or shard.is_empty:
        return shard
    if shard.dim == 0:
        per = 2 if kind == "weight" and found.packed else 1
    elif kind in ("weight_scale", "weight_offset"):
        return Shard()
    else:
        per = {"weight": 1, "scale_bias": columns // SLICES}.get(kind, found.group)
    return Shard(shard.dim, tuple((start // per, stop // per) for start, stop in shard.ranges))


def verify(folder: Path, config: K3Config, found: Layout) -> Manifest:
    """Compare all headers with the table, whatever the index is called. Raises CheckpointError for what differs."""
    return verify_headers(folder, config, table=table(config, found), weight_map=_weight_map(folder))


def _weight_map(folder: Path) -> dict[str, str]:
    """Stored name -> file: by the one index there is, else by the headers of all files."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"{folder}: has several indices ({', '.join(i.name for i in indices)}); keep one")
    if not indices:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no safetensors file; is this a checkpoint folder?")
        return {tensor.stored_name: file.name for file in files for tensor in read_header(file)}
    try:
        weight_map = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
        if any(Path(file).name != file for file in weight_map.values()):
            raise ValueError("names files outside the folder")
        return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{indices[0].name}: cannot be read ({type(error).__name__}: {error})") from None


# --------------------------------------------------------------------------------------------------------------- values


def decode(parts: Mapping[str, Tensor], found: Layout) -> tuple[Tensor, Tensor]:
    """(int8 codes [N, K] in -8 .. 7, fp32 scales [N, K / g]; [N, 1] per channel) of one matrix or a rank's part of it.

    parts: kind -> tensor. Raises CheckpointError for offsets, scales that are not positive numbers, codes outside int4,
    and a ``scale_bias`` that belongs to other codes.
    """
    for kind in ("weight_offset", "weight_offset_second"):
        if kind in parts and bool(parts[kind].any()):
            raise CheckpointError(f"{kind} is not zero: only symmetric quantisation is supported")
    codes = _codes(parts["weight"], found)
    scale = parts["weight_scale"]
    if found.group:
        scale = scale * parts["weight_scale_second"]
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise CheckpointError("a scale is negative or not a number: the file is damaged or was converted wrongly")
    if "scale_bias" in parts:
        _compare_bias(codes, scale, parts["scale_bias"], found)
    return codes, scale


def dequantised(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Values of an int8 matrix [N, K] or a rank's part of it, rounded once to ``dtype``.

    Raises CheckpointError for offsets and for scales that are not positive numbers.
    """
    if bool(parts["weight_offset"].any()):
        raise CheckpointError("weight_offset is not zero: only symmetric quantisation is supported")
    scale = parts["weight_scale"]
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise CheckpointError("a scale is negative or not a number: the file is damaged or was converted wrongly")
    return (parts["weight"].float() * scale).to(dtype)


def _codes(stored: Tensor, found: Layout) -> Tensor:
    if found.packed:  # arithmetic shifts keep the sign; the low nibble belongs to the even row
        return torch.stack([(stored << 4) >> 4, stored >> 4], dim=1).flatten(0, 1)
    if stored.numel() and (int(stored.min()) < -8 or int(stored.max()) > 7):
        raise CheckpointError("codes lie outside -8 .. 7: these are not int4 weights")
    return stored


def _compare_bias(codes: Tensor, scale: Tensor, stored: Tensor, found: Layout) -> None:
    """The stored bias is 8 times the sum of each row's values.

    Both scales, and with groups their product too, were rounded to bfloat16 when it was made: each value may be off by
    3 * 2^-9 of itself, and sums in fp32 by little more. Rows of exchanged codes differ by 1 / sqrt(K) or more.
    """
    values = codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
    expected, size = 8 * values.sum(1), 8 * values.abs().sum(1)
    bound = size * (2**-7 if found.group else 2**-14)
    wrong = ~((stored.sum(1) - expected).abs() <= bound)
    if bool(wrong.any()):
        raise CheckpointError(
            f"scale_bias of {int(wrong.sum())} of {len(wrong)} rows does not belong to the codes: they are damaged or "
            "packed in another order"
        )


class Store(W4A8):
    """Experts in the form of the int4 products, filled from ModelSlim's tensors.

    expected: what one expert has, by (matrix, kind).
    """

    def __init__(self, count: int, width: int, latent: int, found: Layout) -> None:
        if any(size % (found.group or 8) for size in (width, latent)):
            raise ConfigError(f"int4 experts need widths that {found.group or 8} divides, not {width} and {latent}")
        super().__init__(count, width, latent, found.group)
        self.layout = found
        self.expected = tuple((matrix, kind) for matrix in ("w1", "w2", "w3") for kind in found.kinds())

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """One expert, its codes as they are."""
        for matrix in ("w1", "w2", "w3"):
            of_matrix = {kind: parts[matrix, kind] for kind in self.layout.kinds()}
            try:
                codes, scale = decode(of_matrix, self.layout)
            except CheckpointError as error:
                raise CheckpointError(f"{matrix}: {error}") from None
            self.put_codes(index, matrix, codes.to(self.w13.device), scale.to(self.w13.device))
