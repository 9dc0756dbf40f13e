"""Reads the packed golden data in `goldens/` (see its README): arrays, JSON, images and the two tiny checkpoints.

Importable from every test as `import golden_data` (the conftest beside it puts this folder on the path).

    golden_data.tensors("ops/kda_op.safetensors")          -> {key: torch.Tensor}, BF16 kept
    golden_data.arrays("k3-tiny-goldens/text_fp32.npz")    -> {key: numpy.ndarray}, BF16 upcast to fp32
    golden_data.load_json("k3-tiny-goldens/text_fp32.json")
    golden_data.path("k3-tiny-goldens/images/rgb_56x56.png")
    golden_data.checkpoint("k3-tiny")                      -> directory with the checkpoint, bit for bit

A pack (`*.k3g`) is one xz stream of a JSON table and byte planes. Values of one dtype are laid end to end, rotated left
by a bit (which moves the sign below the mantissa and the whole exponent into the top byte) and split into planes, most
significant first: exponents compress, mantissas do not.

Most BF16 weights and inputs are pseudo-random by construction (torch.Generator, Mersenne Twister), so a pack holds for
each of them the position in that generator's stream, mean and scales, and the few elements that rounding decides
otherwise. What comes out is checked: a checkpoint's files and each pack's arrays against their recorded SHA-256.
"""

import functools
import hashlib
import json
import lzma
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent / "goldens"
MAGIC = b"K3G1"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]
ROTATED = {"float32": np.uint32, "bfloat16": np.uint16}


# --- byte planes -----------------------------------------------------------------------------------------------------
# BF16 arrays are carried as uint16 bits under the dtype name "bfloat16".
Table = dict[str, tuple[str, np.ndarray]]


def encode(table: Table, extra: dict[str, Any] | None = None, recipes: dict[str, list[Any]] | None = None) -> bytes:
    """Pack named (dtype name, array) pairs and a JSON-able dictionary.

    recipes: {name: [shape, seed, position, mean, scales]} of BF16 arrays that are regenerated; elements they get wrong
    are in `table` as "index:name" (int32) and "value:name" (bfloat16).
    """
    entries = [[name, dtype, list(array.shape)] for name, (dtype, array) in table.items()]
    head = json.dumps(
        {"arrays": entries, "recipes": recipes or {}, "extra": extra or {}}, separators=(",", ":")
    ).encode()
    body = []
    for dtype in sorted({dtype for dtype, _ in table.values()}):
        flat = np.concatenate([array.ravel() for kind, array in table.values() if kind == dtype])
        if dtype in ROTATED:
            bits = flat.view(ROTATED[dtype])
            flat = (bits << 1) | (bits >> (bits.itemsize * 8 - 1))
        planes = np.ascontiguousarray(flat).view(np.uint8).reshape(-1, flat.itemsize)
        body.extend(planes[:, i].tobytes() for i in reversed(range(flat.itemsize)))
    raw = len(head).to_bytes(4, "little") + head + b"".join(body)
    return MAGIC + lzma.compress(raw, format=lzma.FORMAT_XZ, filters=FILTERS)


def decode(pack: bytes) -> tuple[Table, dict[str, Any]]:
    """Undo `encode`."""
    if pack[:4] != MAGIC:
        raise ValueError("not a golden pack")
    raw = lzma.decompress(pack[4:])
    size = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + size])
    table: Table = {}
    at = 4 + size
    for dtype in sorted({dtype for _, dtype, _ in head["arrays"]}):
        entries = [(name, shape) for name, kind, shape in head["arrays"] if kind == dtype]
        storage = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        count = sum(math.prod(shape) for _, shape in entries)
        planes = np.frombuffer(raw, np.uint8, count * storage.itemsize, at).reshape(storage.itemsize, count)
        at += planes.size
        flat = np.ascontiguousarray(planes[::-1].T).view(storage).ravel()
        if dtype in ROTATED:
            bits = flat.view(ROTATED[dtype])
            flat = ((bits >> 1) | (bits << (bits.itemsize * 8 - 1))).view(storage)
        start = 0
        for name, shape in entries:
            stop = start + math.prod(shape)
            table[name] = (dtype, flat[start:stop].reshape(shape))
            start = stop
    regenerate(table, head["recipes"])
    return table, head["extra"]


def regenerate(table: Table, recipes: dict[str, list[Any]]) -> None:
    """Add the arrays that `recipes` describes and take their lists of exceptions out of `table`."""
    for seed in sorted({recipe[1] for recipe in recipes.values()}):
        mine = {name: recipe for name, recipe in recipes.items() if recipe[1] == seed}
        stream = NormalStream(seed, max(recipe[2] + math.prod(recipe[0]) for recipe in mine.values()))
        for name, (shape, _, position, mean, scales) in mine.items():
            bits = predict_bits(stream, position, math.prod(shape), mean, scales)
            if f"index:{name}" in table:
                bits[table.pop(f"index:{name}")[1]] = table.pop(f"value:{name}")[1]
            table[name] = ("bfloat16", bits.reshape(shape))


def digest(table: Table) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, independent of the order."""
    total = hashlib.sha256()
    for name in sorted(table):
        dtype, array = table[name]
        total.update(f"{name} {dtype} {list(array.shape)}".encode() + np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


# --- pseudo-random matrices ------------------------------------------------------------------------------------------
class NormalStream:
    """The standard normals of torch.Generator().manual_seed(seed) on a CPU, addressable by position in draws."""

    def __init__(self, seed: int, draws: int) -> None:
        generator = np.random.MT19937()
        generator._legacy_seeding(seed)
        self.uniform = (generator.random_raw(draws) & 0xFFFFFF).astype(np.float64) / 2**24

    def normals(self, position: int, count: int) -> np.ndarray:
        """`count` (a multiple of 16) fp32 normals: Box-Muller in blocks of 8 cosines and 8 sines, as torch fills."""
        pairs = self.uniform[position : position + count].reshape(-1, 2, 8)
        radius, angle = np.sqrt(-2 * np.log(1 - pairs[:, 0])), 2 * np.pi * pairs[:, 1]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel().astype(np.float32)


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round fp32 values to BF16 (to nearest, ties to even) and return the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def predict_bits(stream: NormalStream, position: int, count: int, mean: float, scales: list[float]) -> np.ndarray:
    """BF16 bits of mean + scale * normal, the scale given once or for each of equal runs (rows)."""
    runs = stream.normals(position, count).reshape(len(scales), -1)
    return to_bf16_bits(np.float32(mean) + np.array(scales, np.float32)[:, None] * runs).ravel()


# --- reading ---------------------------------------------------------------------------------------------------------
def _pack_path(name: str) -> Path:
    return (ROOT / name).with_suffix(".k3g")


@functools.lru_cache(maxsize=8)
def _read(name: str) -> tuple[Table, dict[str, Any]]:
    table, extra = decode(_pack_path(name).read_bytes())
    if digest(table) != extra["digest"]:
        raise ValueError(f"{name}: the unpacked arrays are not the recorded ones")
    return table, extra


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Fresh tensors of a packed array file, keyed as in the original; BF16 stays BF16."""
    result = {}
    for key, (dtype, array) in _read(name)[0].items():
        tensor = torch.from_numpy(array.copy())
        result[key] = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    return result


def arrays(name: str) -> dict[str, np.ndarray]:
    """Numpy arrays of a packed array file; BF16 values come as fp32."""
    result = {}
    for key, (dtype, array) in _read(name)[0].items():
        wide = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array.copy()
        result[key] = wide
    return result


def load_json(name: str) -> Any:
    """A JSON golden, stored plain or as `.xz`."""
    plain = ROOT / name
    if plain.exists():
        return json.loads(plain.read_text(encoding="utf-8"))
    return json.loads(lzma.decompress(plain.with_name(plain.name + ".xz").read_bytes()).decode("utf-8"))


def path(name: str) -> Path:
    """A file that is stored as it is (images)."""
    found = ROOT / name
    if not found.is_file():
        raise FileNotFoundError(found)
    return found


# --- checkpoints -----------------------------------------------------------------------------------------------------
def checkpoint(name: str, directory: Path | None = None) -> Path:
    """The tiny checkpoint `name` ("k3-tiny" or "k3-linear-tiny") as a directory of its original files.

    Written once into `directory` (default: a folder of the system's temporary directory, named by the pack's hash) and
    reused afterwards. Treat it as read-only: copy it before damaging it. Raises ValueError where a file's SHA-256
    differs from the recorded one.
    """
    version = hashlib.sha256(_pack_path(name).read_bytes()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    base = directory or Path(tempfile.gettempdir()) / f"k3-goldens-{user}-{version}"
    target = base / name
    if target.is_dir():
        return target
    base.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=base))
    try:
        write_checkpoint(name, scratch)
        scratch.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(scratch, ignore_errors=True)
        if not target.is_dir():
            raise
    return target


def write_checkpoint(name: str, directory: Path) -> None:
    """Write the files of checkpoint `name` into `directory`, each checked against its recorded SHA-256."""
    table, extra = _read(name)
    for filename, expected in extra["sha256"].items():
        content = table[f"file:{filename}"][1].tobytes()
        if filename.endswith(".safetensors"):  # what is stored is the header
            header = json.loads(content[8:])
            header.pop("__metadata__", None)
            by_offset = sorted(header, key=lambda key: header[key]["data_offsets"])
            content += b"".join(table[f"tensor:{key}"][1].tobytes() for key in by_offset)
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError(f"{name}/{filename}: the unpacked file is not the recorded one")
        (directory / filename).write_bytes(content)
