"""Comparing a checkpoint's headers with the tensor table before any weight is loaded, and values while they are."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from k3_core.checkpoint.a_log import a_log_shape_fits, normalize_a_log
from k3_core.checkpoint.headers import SINGLE_NAME, StoredTensor, read_header, read_index, stated_size
from k3_core.checkpoint.names import canonical_name
from k3_core.checkpoint.table import TensorSpec, tensor_table
from k3_core.config import K3Config, load_config
from k3_core.contracts.mxfp4 import NAN_SCALE
from k3_core.errors import CheckpointError

#: How many names a problem lists before it only counts.
SHOWN = 3

#: Kimi-Linear's small tensors occur in F32 and in the model's dtype (K3-SPEC 1.6); Kimi K3's are always F32.
_SMALL = (".A_log", ".dt_bias", "conv1d.weight", ".o_norm.weight", ".e_score_correction_bias")


class Manifest(Mapping[str, StoredTensor]):
    """Released name -> where and how the tensor is stored, for a checkpoint whose headers have been verified.

    ``warnings``: sentences about what is odd in the folder although every tensor is there as it must be.
    """

    def __init__(
        self, folder: Path, config: K3Config, tensors: dict[str, StoredTensor], warnings: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.config = config
        self.warnings = warnings
        self._tensors = tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def by_shard(self) -> dict[str, list[str]]:
        """Shard file name -> released names in file order; shards in order of their names."""
        shards: dict[str, list[str]] = {}
        for name, tensor in self._tensors.items():
            shards.setdefault(tensor.shard, []).append(name)
        return {
            shard: sorted(names, key=lambda name: self._tensors[name].begin) for shard, names in sorted(shards.items())
        }


class _Problems:
    """Collects problems by kind; raises them as one message that stays readable for half a million tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kinds: dict[tuple[str, str], list[str]] = {}

    def add(self, kind: str, advice: str, detail: str) -> None:
        self._kinds.setdefault((kind, advice), []).append(detail)

    def raise_if_any(self) -> None:
        if not self._kinds:
            return
        parts = []
        for (kind, advice), details in self._kinds.items():
            more = f"; and {len(details) - SHOWN} more" if len(details) > SHOWN else ""
            parts.append(f"{kind} ({len(details)}): {'; '.join(details[:SHOWN])}{more}. {advice}.")
        raise CheckpointError(f"{self._folder}: " + " ".join(parts))


def verify_headers(
    path: str | Path,
    config: K3Config | None = None,
    *,
    table: dict[str, TensorSpec] | None = None,
    weight_map: dict[str, str] | None = None,
) -> Manifest:
    """Compare the headers of all shards with the tensor table; reads no tensor data.

    Args:
        path: checkpoint folder, with an index or one `model.safetensors`.
        config: what the checkpoint must hold; None reads the folder's own config.json.
        table: its tensors, where they are not the released ones of ``config`` (another quantisation).
        weight_map: stored name -> file, where the index has another name than the released one.

    Returns:
        Where every tensor is.

    Raises:
        CheckpointError: a missing or damaged shard, an index that disagrees with the shards, a tensor that is missing,
            unknown, stored twice, or of the wrong dtype or shape. One message names shard, tensor, what was expected,
            what was found and what to do; each kind of problem shows its first names and a count.
        ConfigError: from reading the folder's config.json.
    """
    folder = Path(path)
    parsed = load_config(folder) if config is None else config
    weight_map = read_index(folder) if weight_map is None else weight_map
    problems = _Problems(folder)
    stored = _read_shards(folder, weight_map, problems)
    problems.raise_if_any()  # without the shards nothing else can be said
    table = tensor_table(parsed) if table is None else table
    found = _by_released_name(stored, weight_map, table, parsed, problems)
    _compare(found, table, parsed, problems)
    problems.raise_if_any()
    return Manifest(folder, parsed, found, tuple(_oddities(folder, weight_map, stored)))


def _oddities(folder: Path, weight_map: dict[str, str] | None, stored: list[StoredTensor]) -> Iterator[str]:
    """What does not keep the checkpoint from being read, but is not what a whole download looks like."""
    total, stated = sum(tensor.nbytes for tensor in stored), stated_size(folder)
    if weight_map is not None and stated is not None and stated != total:
        yield (
            f"the index states total_size = {stated}, its shards hold {total} bytes of tensors; every tensor is there, "
            "so the index was written for other files or by a faulty converter"
        )
    named = {SINGLE_NAME} if weight_map is None else set(weight_map.values())
    extra = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in named)
    if extra:
        more = f" and {len(extra) - SHOWN} more" if len(extra) > SHOWN else ""
        yield f"{', '.join(extra[:SHOWN])}{more}: not named by the index and not read; remove what is left over"


def _read_shards(folder: Path, weight_map: dict[str, str] | None, problems: _Problems) -> list[StoredTensor]:
    advice = "Fetch the named file again"
    tensors: list[StoredTensor] = []
    for shard in [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values())):
        try:
            tensors += read_header(folder / shard)
        except FileNotFoundError:
            assert weight_map is not None
            name = next(name for name, file in weight_map.items() if file == shard)
            problems.add("shard missing", advice, f"{shard}, which the index names for {name}, does not exist")
        except CheckpointError as error:
            problems.add("shard damaged", advice, str(error))
        except OSError as error:
            problems.add("shard unreadable", "Check the file's permissions and the disk", f"{shard}: {error.strerror}")
    return tensors


def _by_released_name(
    stored: list[StoredTensor],
    weight_map: dict[str, str] | None,
    table: dict[str, TensorSpec],
    config: K3Config,
    problems: _Problems,
) -> dict[str, StoredTensor]:
    advice = "Index and shards come from different downloads: fetch the checkpoint again"
    found: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = tensor.stored_name
        if name not in table:  # half a million names: only unusual ones are worth mapping
            name = canonical_name(name, config)
        if name in found:
            first = found[name]
            problems.add(
                "tensor stored twice", "Remove the stale shard or fetch the checkpoint again",
                f"{name} in {first.shard} as {first.stored_name} and in {tensor.shard} as {tensor.stored_name}",
            )  # fmt: skip
            continue
        found[name] = tensor
        if weight_map is None:
            continue
        if tensor.stored_name not in weight_map:
            problems.add("tensor not in the index", advice, f"{tensor.stored_name} in {tensor.shard}")
        elif weight_map[tensor.stored_name] != tensor.shard:
            detail = f"{tensor.stored_name} is in {tensor.shard}, the index says {weight_map[tensor.stored_name]}"
            problems.add("tensor in another shard than the index says", advice, detail)
    held = {tensor.stored_name for tensor in stored}
    for stored_name, shard in (weight_map or {}).items():
        if stored_name not in held:
            detail = f"the index places {stored_name} in {shard}, which does not hold it"
            problems.add("tensor not in its shard", advice, detail)
    return found


def _compare(
    found: dict[str, StoredTensor], table: dict[str, TensorSpec], config: K3Config, problems: _Problems
) -> None:
    for name, spec in table.items():
        tensor = found.get(name)
        if tensor is None:
            problems.add(
                "tensor missing", "Fetch the checkpoint again, or check that config.json belongs to it",
                f"{name}, expected {spec.dtype_name} {list(spec.shape)}, found nothing",
            )  # fmt: skip
            continue
        if tensor.shape == spec.shape and tensor.dtype_name == spec.dtype_name:
            continue
        where = f"{tensor.shard}: {tensor.stored_name}"
        dtypes = _accepted_dtypes(name, spec, config)
        if tensor.dtype_name not in dtypes:
            problems.add(
                "wrong dtype", _dtype_advice(tensor, spec),
                f"{where}, expected {' or '.join(dtypes)}, found {tensor.dtype_name}",
            )  # fmt: skip
        if not _shape_fits(name, tensor.shape, spec, config):
            problems.add(
                "wrong shape", "Check that config.json belongs to this checkpoint",
                f"{where}, expected {list(spec.shape)}, found {list(tensor.shape)}",
            )  # fmt: skip
    for name in sorted(found.keys() - table.keys()):
        tensor = found[name]
        problems.add(
            "unexpected tensor", "Check that config.json belongs to this checkpoint; drafts and MTP are not supported",
            f"{tensor.shard}: {tensor.stored_name} ({tensor.dtype_name} {list(tensor.shape)}), expected no such tensor",
        )  # fmt: skip


def _accepted_dtypes(name: str, spec: TensorSpec, config: K3Config) -> tuple[str, ...]:
    if config.is_kimi_linear and name.endswith(_SMALL):
        return tuple(dict.fromkeys((spec.dtype_name, "F32", "BF16")))
    return (spec.dtype_name,)


def _dtype_advice(tensor: StoredTensor, spec: TensorSpec) -> str:
    if spec.dtype_name == "F32":
        return "These tensors are kept in F32, rounding them changes results: use the original checkpoint"
    if spec.dtype_name == "U8" or tensor.dtype_name == "U8":
        return "Only the routed experts are stored packed as U8: use a checkpoint in the released layout"
    return "Convert the checkpoint to the dtype in its config.json"


def _shape_fits(name: str, shape: tuple[int, ...], spec: TensorSpec, config: K3Config) -> bool:
    if name.endswith(".A_log"):
        return a_log_shape_fits(shape, config.text.linear_attn.num_heads)
    return shape == spec.shape


def check_values(name: str, tensor: Tensor, stored: StoredTensor, config: K3Config) -> None:
    """Check what only the data can show: scale bytes that mean NaN, and A_log's tail.

    `tensor` is the whole A_log, or any part of another tensor. Raises CheckpointError naming shard and tensor.
    """
    where = f"{stored.shard}: {stored.stored_name}"
    if name.endswith(".weight_scale"):
        if tensor.dtype == torch.uint8 and tensor.numel() and int(tensor.max()) == NAN_SCALE:
            bad = int((tensor == NAN_SCALE).sum())
            raise CheckpointError(
                f"{where}: {bad} of {tensor.numel()} scale bytes are 255, which is NaN; expected 0..254. The file is "
                f"damaged or was converted wrongly: fetch it again"
            )
    elif name.endswith(".A_log"):
        normalize_a_log(tensor, config.text.linear_attn.num_heads, where)
