"""Reading safetensors headers and the shard index, without touching tensor data.

Layout of a file: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets [begin, end)}},
then the data, which the offsets cover without gaps (safetensors format documentation). So a header alone tells whether
a file was cut short, and how much is missing.
"""

import json
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from k3_core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER = 1 << 28
_AGAIN = "fetch this file again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a shard stores it. `begin` is the offset of its data in the file."""

    stored_name: str
    shard: str
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one shard in file order.

    Raises CheckpointError naming the shard where the file is cut short, has trailing bytes, or is not safetensors.
    """
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # a folder says so itself when it is opened
        raise CheckpointError(f"{path.name}: not a regular file")
    size = found.st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER:
            raise CheckpointError(f"{path.name}: not a safetensors file ({size} bytes; header length {length})")
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(
            f"{path.name}: cut short inside its header ({size} bytes, at least {8 + length} expected)"
        )
    try:
        entries: dict[str, dict[str, Any]] = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = [_tensor(name, entry, path.name, 8 + length) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name}: its header is damaged ({type(error).__name__}: {error})") from None
    tensors.sort(key=lambda tensor: tensor.begin)
    _check_cover(tensors, path.name, 8 + length, size)
    return tensors


def _tensor(name: str, entry: dict[str, Any], shard: str, data: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    for number in (begin, end, *entry["shape"]):
        if type(number) is not int or number < 0:
            raise TypeError(f"{name}: {number!r} in shape or data_offsets, expected counts")
    tensor = StoredTensor(name, shard, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
    item = _ITEM_BYTES.get(tensor.dtype_name)
    if item is not None and prod(tensor.shape) * item != tensor.nbytes:
        raise CheckpointError(
            f"{shard}: {name} is declared {tensor.dtype_name} {list(tensor.shape)} but holds {tensor.nbytes} bytes; "
            f"the header is damaged"
        )
    return tensor


def _check_cover(tensors: list[StoredTensor], shard: str, data: int, size: int) -> None:
    position = data
    for tensor in tensors:
        if tensor.begin != position:
            raise CheckpointError(f"{shard}: data of {tensor.stored_name} starts at {tensor.begin}, not {position}")
        position += tensor.nbytes
    if size < position:
        lost = next(t for t in tensors if t.begin + t.nbytes > size)
        raise CheckpointError(
            f"{shard}: cut short, {size} of {position} bytes are there ({lost.stored_name} and what follows it is "
            f"missing)"
        )
    if size > position:
        raise CheckpointError(f"{shard}: {size - position} bytes follow its last tensor; the file is damaged")


def stated_size(folder: Path) -> int | None:
    """The bytes of tensor data that the index states (`metadata.total_size`), or None where it states none."""
    try:
        size = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["metadata"]["total_size"]
        return int(size)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def read_index(folder: Path) -> dict[str, str] | None:
    """The index's weight_map (tensor name -> file name), or None for a checkpoint of one `model.safetensors`.

    Raises CheckpointError where there is neither, or the index cannot be read.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        if (folder / SINGLE_NAME).is_file():
            return None
        raise CheckpointError(f"{folder}: holds neither {INDEX_NAME} nor {SINGLE_NAME}; is this a checkpoint folder?")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror or error}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: cannot be read as JSON ({type(error).__name__}: {error}); {_AGAIN}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no weight_map object from tensor names to file names; {_AGAIN}")
    wrong = next((name for name, file in weight_map.items() if not isinstance(file, str)), None)
    if wrong is not None:
        raise CheckpointError(f"{index}: maps {wrong} to {weight_map[wrong]!r}, which is no file name; {_AGAIN}")
    outside = sorted(file for file in set(weight_map.values()) if Path(file).name != file)
    if outside:
        raise CheckpointError(
            f"{index}: names {outside[0]!r}, which is not a plain file name; shards lie in the checkpoint's own folder"
        )
    return weight_map
