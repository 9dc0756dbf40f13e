"""Which part of every tensor a rank loads: pure functions of (configuration, topology).

Tensor parallelism (K3-SPEC 2.3) cuts by head: q, k, v, g, f_b, b, the convolutions, dt_bias, A_log, q_b and kv_b by
rows, o_proj by columns. Feed-forward widths are cut by rows of gate and up and columns of down. Embedding and lm_head
are cut by vocabulary. f_a, g_a, o_norm, all norms, the AttnRes vectors, the router, the latent projections, q_a and
kv_a are replicated. A_log's part is one of the normalised vector [heads] (`normalize_a_log`), whatever the stored
shape. The vision tower is cut by head where the heads divide, else every rank holds all of it (7.4); the projector is
replicated.

Routed experts are cut along their width over tp * dp ranks, or, with expert parallelism, given whole to ranks in
consecutive runs (6.4). Widths below a floor are padded (6.5): `expert_width` and `pad_expert`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.checkpoint.names import canonical_name
from k3_core.checkpoint.table import TensorSpec, tensor_table
from k3_core.config import K3Config
from k3_core.contracts.mxfp4 import GROUP_SIZE
from k3_core.errors import CheckpointError, ConfigError

#: vLLM pads the vocabulary to a multiple of this before cutting it.
VOCAB_MULTIPLE = 64
#: e8m0 byte of padded scales: 2^0. Any finite exponent serves; 255 would be NaN, and 0 x NaN = NaN.
PADDING_SCALE = 127


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's place. With `ep_size` 1 experts are cut over tp * dp ranks; above 1 they are whole, by EP rank."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    vision_data_parallel: bool = False

    def __post_init__(self) -> None:
        for kind in ("tp", "ep", "dp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if size < 1 or not 0 <= rank < size:
                raise ConfigError(f"{kind}_rank = {rank}, {kind}_size = {size}: expected 0 <= rank < size")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one tensor that a rank holds: `ranges` along `dim`, in order, concatenated.

    `dim` None means the whole tensor; no ranges with a `dim` means nothing (another rank's expert).
    """

    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole tensor."""
        return self.dim is None

    @property
    def is_empty(self) -> bool:
        """Whether the rank holds nothing of the tensor."""
        return self.dim is not None and not self.ranges

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a tensor of shape `full`."""
        if self.dim is None:
            return full
        length = sum(stop - start for start, stop in self.ranges)
        return (*full[: self.dim], length, *full[self.dim + 1 :])

    def take(self, tensor: Tensor) -> Tensor:
        """The part itself: a view where it is one contiguous range, else a copy."""
        if self.dim is None:
            return tensor
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if not parts:
            return tensor.narrow(self.dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


WHOLE = Shard()
NOTHING = Shard(0, ())


def check_topology(config: K3Config, topology: Topology) -> None:
    """Refuse, before anything loads, sizes that do not divide the model. Raises ConfigError naming key and value."""
    text, tp = config.text, topology.tp_size
    dense = any(not text.is_moe_layer(i) for i in range(text.num_hidden_layers))
    divided = {
        "num_attention_heads": text.num_attention_heads,
        "linear_attn_config.num_heads": text.linear_attn.num_heads,
        "num_shared_experts * moe_intermediate_size": text.shared_intermediate_size,
    }
    if dense:
        divided["intermediate_size"] = text.intermediate_size
    for key, value in divided.items():
        if value % tp:
            raise ConfigError(
                f"tensor parallel size {tp} does not divide {key} = {value}; "
                f"sizes that do: {', '.join(map(str, tp_sizes(config)))}"
            )
    expert_width(config, tp, topology.ep_size, topology.dp_size)
    if topology.ep_size > text.num_experts:
        raise ConfigError(f"expert parallel size {topology.ep_size} exceeds num_experts = {text.num_experts}")


def tp_sizes(config: K3Config) -> list[int]:
    """Tensor parallel sizes that cut every head and width of the model (routed experts aside: see `expert_width`)."""
    text = config.text
    widths = [text.linear_attn.num_heads, text.shared_intermediate_size]
    if any(not text.is_moe_layer(i) for i in range(text.num_hidden_layers)):
        widths.append(text.intermediate_size)
    return [
        n
        for n in range(1, text.num_attention_heads + 1)
        if all(w % n == 0 for w in (text.num_attention_heads, *widths))
    ]


def expert_width(config: K3Config, tp: int, ep: int = 1, dp: int = 1, floor: int = 256) -> tuple[int, int]:
    """Width of one rank's routed experts: (unpadded, padded).

    With `ep` > 1 experts are whole and nothing is padded. Otherwise moe_intermediate_size is cut over tp * dp shards
    and, if there is more than one, padded to at least `floor` (K3: TP8 384 and 384, TP16 192 and 256, TP32 96 and 256).
    The unpadded width is the loader's: shard r holds columns r * unpadded onwards.

    Raises ConfigError where the shards do not divide the width, or would split an MXFP4 group of 32.
    """
    width = config.text.moe_intermediate_size
    for name, size in (("tp", tp), ("ep", ep), ("dp", dp)):
        if size < 1:
            raise ConfigError(f"{name} = {size}: expected a size of at least 1")
    if ep > 1 or tp * dp == 1:
        return width, width
    shards = tp * dp
    if width % shards:
        raise ConfigError(f"{shards} expert shards (tp {tp} x dp {dp}) do not divide moe_intermediate_size = {width}")
    unpadded = width // shards
    if config.quantization is not None and unpadded % GROUP_SIZE:
        raise ConfigError(
            f"{shards} expert shards (tp {tp} x dp {dp}) leave width {unpadded} of moe_intermediate_size = {width}, "
            f"which splits an MXFP4 group of {GROUP_SIZE}; use fewer shards or expert parallelism"
        )
    return unpadded, max(unpadded, floor)


def expert_range(config: K3Config, ep_size: int, ep_rank: int) -> range:
    """Ids of the experts that an EP rank holds: consecutive runs, the first ranks one longer where it must be."""
    if ep_size < 1 or not 0 <= ep_rank < ep_size:
        raise ConfigError(f"ep_rank = {ep_rank}, ep_size = {ep_size}: expected 0 <= rank < size")
    base, longer = divmod(config.text.num_experts, ep_size)
    start = ep_rank * base + min(ep_rank, longer)
    return range(start, start + base + (ep_rank < longer))


def vocab_range(vocab_size: int, tp_size: int, tp_rank: int) -> range:
    """Rows of embedding and lm_head of a rank: the vocabulary, padded to 64, in equal runs; the last may be short."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    step = -(-padded // tp_size)
    return range(min(tp_rank * step, vocab_size), min((tp_rank + 1) * step, vocab_size))


def shard_plan(config: K3Config, topology: Topology) -> dict[str, Shard]:
    """Name -> part for every tensor of the checkpoint. Raises ConfigError as `check_topology` does."""
    check_topology(config, topology)
    return {name: _shard(name, spec, config, topology) for name, spec in tensor_table(config).items()}


def tensor_shard(name: str, shape: tuple[int, ...], config: K3Config, topology: Topology) -> Shard:
    """The part of one stored tensor, by any known name and its stored shape (of A_log: normalise it first)."""
    check_topology(config, topology)
    return _shard(canonical_name(name, config), TensorSpec(shape, torch.uint8), config, topology)


_ROWS_BY_HEAD = re.compile(
    r"\.self_attn\.(?:(?:q|k|v|g|b|f_b|g_b|q_b|kv_b)_proj\.weight|[qkv]_conv1d\.weight|dt_bias)$"
)
_EXPERT = re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w([123])\.weight")
_GATE_UP = re.compile(r"\.(?:mlp|shared_experts)\.(?:gate|up)_proj\.weight$")
_DOWN = re.compile(r"\.(?:mlp|shared_experts)\.down_proj\.weight$")


def _shard(name: str, spec: TensorSpec, config: K3Config, topology: Topology) -> Shard:
    tp, rank, shape = topology.tp_size, topology.tp_rank, spec.shape
    expert = _EXPERT.search(name)
    if expert:
        return _expert_shard(int(expert[1]), expert[2], shape, config, topology)
    if name.startswith(("vision_tower.", "mm_projector.")):
        return _vision_shard(name, shape, config, topology)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        rows = vocab_range(shape[0], tp, rank)
        return _cut(0, shape, (rows.start, rows.stop))
    if name.endswith(".A_log"):
        step = config.text.linear_attn.num_heads // tp  # of the normalised vector: the zero tail belongs to nobody
        return Shard(0, ((rank * step, (rank + 1) * step),))
    if _ROWS_BY_HEAD.search(name) or _GATE_UP.search(name):
        return _even(0, shape, tp, rank)
    if name.endswith(".self_attn.o_proj.weight") or _DOWN.search(name):
        return _even(1, shape, tp, rank)
    return WHOLE


def _expert_shard(expert: int, part: str, shape: tuple[int, ...], config: K3Config, topology: Topology) -> Shard:
    if topology.ep_size > 1:
        return WHOLE if expert in expert_range(config, topology.ep_size, topology.ep_rank) else NOTHING
    shards = topology.tp_size * topology.dp_size
    return _even(1 if part == "2" else 0, shape, shards, topology.dp_rank * topology.tp_size + topology.tp_rank)


def _vision_shard(name: str, shape: tuple[int, ...], config: K3Config, topology: Topology) -> Shard:
    vision, tp, rank = config.vision, topology.tp_size, topology.tp_rank
    assert vision is not None
    divides = vision.vt_num_attention_heads % tp == 0 and vision.vt_intermediate_size % tp == 0
    if topology.vision_data_parallel or not divides:
        return WHOLE
    if name.endswith(".wqkv.weight"):  # q, k and v are cut one by one
        third, step = shape[0] // 3, shape[0] // 3 // tp
        return _cut(0, shape, *((i * third + rank * step, i * third + (rank + 1) * step) for i in range(3)))
    if name.endswith(".mlp.fc0.weight"):
        return _even(0, shape, tp, rank)
    if name.endswith((".wo.weight", ".mlp.fc1.weight")):
        return _even(1, shape, tp, rank)
    return WHOLE


def _even(dim: int, shape: tuple[int, ...], parts: int, index: int) -> Shard:
    step = shape[dim] // parts
    return _cut(dim, shape, (index * step, (index + 1) * step))


def _cut(dim: int, shape: tuple[int, ...], *ranges: tuple[int, int]) -> Shard:
    kept: list[tuple[int, int]] = []
    for start, stop in ranges:
        if kept and kept[-1][1] == start:
            kept[-1] = (kept[-1][0], stop)
        elif stop > start:
            kept.append((start, stop))
    return WHOLE if kept == [(0, shape[dim])] else Shard(dim, tuple(kept))


def pad_expert(part: str, tensors: Mapping[str, Tensor], padded: int) -> dict[str, Tensor]:
    """Pad one expert matrix of one rank to the width `padded`, so that the padded lanes contribute nothing.

    Args:
        part: "w1", "w3" (rows are the width) or "w2" (columns are).
        tensors: {"weight_packed": uint8, "weight_scale": uint8} or {"weight": float}, already cut.
        padded: width to reach; a multiple of 32 for packed weights.

    Returns:
        The same keys. Codes are padded with 0 and scales with 127 (2^0; never 255, since 0 x NaN = NaN).

    Raises:
        CheckpointError: unknown keys or part, or a width larger than `padded`.
    """
    if part not in ("w1", "w2", "w3") or set(tensors) not in ({"weight"}, {"weight_packed", "weight_scale"}):
        raise CheckpointError(f"cannot pad part {part!r} with tensors {sorted(tensors)}")
    if "weight" not in tensors and padded % GROUP_SIZE:
        raise CheckpointError(f"padded width {padded} is not a multiple of the MXFP4 group size {GROUP_SIZE}")
    columns_per_value = {"weight": 1, "weight_packed": 2, "weight_scale": GROUP_SIZE}
    result = {}
    for key, tensor in tensors.items():
        dim = 1 if part == "w2" else 0
        target = padded // columns_per_value[key] if dim == 1 else padded
        if tensor.shape[dim] > target:
            raise CheckpointError(f"{part}.{key}: width {tensor.shape[dim]} exceeds the padded width {target}")
        shape = list(tensor.shape)
        shape[dim] = target - shape[dim]
        fill = PADDING_SCALE if key == "weight_scale" else 0
        result[key] = torch.cat((tensor, tensor.new_full(shape, fill)), dim)
    return result
