"""Packs a directory of golden data into the repository, and unpacks the tiny checkpoints from it.

    python ci/goldens.py pack DIR [--out packages/k3-core/tests/goldens]    DIR laid out as the goldens' README says
    python ci/goldens.py unpack k3-tiny TARGET                              the checkpoint's original files
    python ci/goldens.py list                                               packs and their sizes

Packing is lossless for what it keeps; `DROPPED` names what it leaves out (redundant or larger than its use).
"""

import argparse
import hashlib
import json
import lzma
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "packages" / "k3-core" / "tests"
sys.path.insert(0, str(TESTS))

import golden_data as gd  # noqa: E402

CHECKPOINTS = ("k3-tiny", "k3-linear-tiny")
BF16 = "bfloat16"
SAFETENSORS_DTYPES = {
    "BF16": BF16, "F32": "float32", "F64": "float64", "U8": "uint8", "I32": "int32", "I64": "int64",
}  # fmt: skip

# Generators of the operator inputs (31337) and of the weights of attn_layers (31338).
OPERATOR_SEEDS = (31337, 31338)
OPERATOR_DRAWS = 3_000_000

# Keys that are not packed, by file (regular expressions).
DROPPED: dict[str, list[str]] = {
    "text_fp32.npz": [
        r"\.(top20_ids|top20_vals|lse)$",  # follow from the logits
        r"^p(1|2|64)\.(bank|prefix_last|mix_probs)$",
        r"^p65\.(bank|prefix_last|mix_probs)$",
        r"^p1\.greedy_step_logits$",
        r"^p17\..*\.kda_state$",  # p65 keeps them; p17's convolution states cover the short prompt
    ],
    "text_bf16.npz": [
        r"\.(top20_ids|top20_vals|lse)$",
        r"^p(1|2|64)\.",
        r"^p17\.(bank|prefix_last|mix_probs|layer\d+\.out)$",
        r"^p65\.mix_probs$",
        r"^p200\.",
    ],
    "vision.npz": [r"\.(top20_ids|top20_vals|lse)$"],
    "kda_op.safetensors": [r"^T64\.", r"^T150\.noinit", r"^varlen\.noinit", r"^T3\.noinit\.state"],
    "attn_res.safetensors": [r"^n0\.T5\.", r"^n1\.T1\.", r"^n4\.T1\.", r"^n8\.T1\."],
    "attn_layers.safetensors": [r"final_state_bf16", r"final_conv_q_bf16"],
}

# Keys of which a part is packed, under a name that says which: {file: {key: (new key, rows)}}.
CUT: dict[str, dict[str, tuple[str, list[int]]]] = {
    "kda_op.safetensors": {"varlen.init.state": ("varlen.init.state_of_2_and_4", [2, 4])},
}


def read_safetensors(path: Path) -> tuple[bytes, gd.Table]:
    """(header bytes with their length prefix, table) of a safetensors file."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    header.pop("__metadata__", None)
    table: gd.Table = {}
    for name, entry in header.items():
        dtype = SAFETENSORS_DTYPES[entry["dtype"]]
        start, stop = entry["data_offsets"]
        storage = np.dtype("uint16" if dtype == BF16 else dtype)
        table[name] = (dtype, np.frombuffer(content[size + start : size + stop], storage).reshape(entry["shape"]))
    return content[:size], table


def read_arrays(path: Path) -> gd.Table:
    """Table of an .npz or .safetensors file; fp32 arrays that are exactly BF16 compress to half by themselves."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)[1]
    with np.load(path) as archive:
        return {name: (archive[name].dtype.name, archive[name]) for name in archive.files}


class Locator:
    """Finds where in a generator's normal stream a BF16 tensor was drawn, as mean + scale * normal."""

    def __init__(self, seed: int, draws: int) -> None:
        self.seed = seed
        self.stream = gd.NormalStream(seed, draws)
        u = self.stream.uniform
        radius, angle = np.sqrt(-2 * np.log(1 - u[:-8])), 2 * np.pi * u[8:]
        # Element j < 8 of a block that starts at o is cosines[o + j], element 8 + j is sines[o + j].
        self.cosines = (radius * np.cos(angle)).astype(np.float32)
        self.sines = (radius * np.sin(angle)).astype(np.float32)
        self.span = draws - 16

    def element(self, index: int) -> np.ndarray:
        """Element `index` (0..15) of the block starting at every offset."""
        source, shift = (self.cosines, index) if index < 8 else (self.sines, index - 8)
        return source[shift : shift + self.span]

    def find(self, values: np.ndarray) -> list[int]:
        """Offsets whose first block is, up to BF16 rounding, an increasing affine image of values[:16]."""
        w = values[:16].astype(np.float64)
        high, low = int(w.argmax()), int(w.argmin())
        if w[high] == w[low]:
            return []
        slack = 2.0**-8 * np.abs(w).max()
        top, bottom = self.element(high), self.element(low)
        spread = top - bottom
        alive = np.flatnonzero(spread > 0)
        for j in np.argsort(np.abs(w - w.mean())):
            scale = (w[high] - w[low]) / spread[alive]
            error = np.abs(w[low] + scale * (self.element(int(j))[alive] - bottom[alive]) - w[j])
            alive = alive[error <= 4 * slack]
        return alive[:50].tolist()

    def fit(self, bits: np.ndarray, position: int) -> tuple[float, list[float]]:
        """(mean, scales) that reproduce the most elements of bits [rows, columns]: one scale, or one a row.

        A scale is found by intersecting the intervals which the elements' BF16 roundings leave for it.
        """
        values = as_fp32(bits).astype(np.float64)
        x = self.stream.normals(position, bits.size).astype(np.float64).reshape(values.shape)
        mean = round(float(values.mean() - x.mean() * values.std() / x.std()))
        half = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), 1e-30))) - 8), 1e-30)
        with np.errstate(divide="ignore"):
            low, high = np.sort(np.stack([(values - half - mean) / x, (values + half - mean) / x]), axis=0)
        low[np.abs(x) <= 0.05], high[np.abs(x) <= 0.05] = -np.inf, np.inf
        whole = float(np.quantile(low, 0.9999) + np.quantile(high, 0.0001)) / 2
        rows = (np.quantile(low, 0.999, axis=1) + np.quantile(high, 0.001, axis=1)) / 2
        candidates = [[whole], [float(np.float32(r)) for r in rows]]
        misses = [np.count_nonzero(self.predict(bits, position, mean, scales) != bits) for scales in candidates]
        return float(mean), candidates[int(misses[1] < misses[0] - 4 * len(rows))]

    def predict(self, bits: np.ndarray, position: int, mean: float, scales: list[float]) -> np.ndarray:
        """What the recipe gives, in the shape of `bits`."""
        return gd.predict_bits(self.stream, position, bits.size, mean, scales).reshape(bits.shape)


def find_seed(values: np.ndarray, limit: int = 20000) -> int | None:
    """The seed whose first 16 normals are proportional to values[:16]."""
    w = values[:16] / np.linalg.norm(values[:16])
    for seed in range(limit):
        x = gd.NormalStream(seed, 16).normals(0, 16)
        if w @ x / np.linalg.norm(x) > 0.999:
            return seed
    return None


def as_fp32(bits: np.ndarray) -> np.ndarray:
    """Values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def compress(table: gd.Table, extra: dict[str, Any], locators: list[Locator]) -> bytes:
    """Encode `table`, replacing BF16 arrays found in one of the streams by recipes, and verify the result."""
    recipes: dict[str, list[Any]] = {}
    stored: gd.Table = {}
    for name, (dtype, array) in table.items():
        recipe = None
        if dtype == BF16 and array.size >= 64 and array.size % 16 == 0:
            recipe = find_recipe(name, array, locators, stored)
        if recipe is None:
            stored[name] = (dtype, array)
        else:
            recipes[name] = recipe
    extra = extra | {"digest": gd.digest(table)}
    content = gd.encode(stored, extra, recipes)
    if gd.digest(gd.decode(content)[0]) != extra["digest"]:
        raise RuntimeError("the pack does not decode to what went in")
    left = sum(array.nbytes for dtype, array in stored.values() if dtype == BF16)
    print(f"  {len(recipes)} arrays regenerated, {len(stored)} stored ({left:,} B of BF16)")
    return content


def find_recipe(name: str, array: np.ndarray, locators: list[Locator], stored: gd.Table) -> list[Any] | None:
    """[shape, seed, position, mean, scales] of an array, its exceptions going into `stored`; None if not found."""
    bits = array.reshape(-1, array.shape[-1])
    best: tuple[int, list[Any], np.ndarray] | None = None
    for locator in locators:
        for position in locator.find(as_fp32(bits.ravel()[:16])):
            if position + bits.size > locator.span:
                continue
            mean, scales = locator.fit(bits, position)
            wrong = np.flatnonzero(locator.predict(bits, position, mean, scales) != bits)
            if best is None or wrong.size < best[0]:
                best = (wrong.size, [list(array.shape), locator.seed, position, mean, scales], wrong)
    if best is None or best[0] > bits.size // 8:
        return None
    if best[0]:
        stored[f"index:{name}"] = ("int32", best[2].astype(np.int32))
        stored[f"value:{name}"] = (BF16, array.ravel()[best[2]])
    return best[1]


def pack_checkpoint(directory: Path) -> bytes:
    """Pack every file of a tiny checkpoint."""
    table: gd.Table = {}
    tensors: gd.Table = {}
    digests: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        digests[path.name] = hashlib.sha256(content).hexdigest()
        if path.suffix == ".safetensors":
            content, found = read_safetensors(path)
            tensors |= found
        table[f"file:{path.name}"] = ("uint8", np.frombuffer(content, np.uint8))
    table |= {f"tensor:{name}": entry for name, entry in tensors.items()}
    embedding = next(a.ravel() for name, (_, a) in tensors.items() if name.endswith("embed_tokens.weight"))
    seed = find_seed(as_fp32(embedding[:16]))
    draws = 2 * sum(array.size for dtype, array in tensors.values() if dtype == BF16)
    print(f"{directory.name}: seed {seed}")
    return compress(table, {"sha256": digests}, [] if seed is None else [Locator(seed, draws)])


def pack(source: Path, out: Path) -> None:
    """Pack golden directory `source` into `out`."""
    for name in CHECKPOINTS:
        write(out / f"{name}.k3g", pack_checkpoint(source / name))
    streams = [Locator(seed, OPERATOR_DRAWS) for seed in OPERATOR_SEEDS]
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_dir() or relative.parts[0] in CHECKPOINTS or "report" in path.stem:
            continue
        target = out / relative
        if path.suffix in (".npz", ".safetensors"):
            rules = DROPPED.get(path.name, [])
            kept = {k: v for k, v in read_arrays(path).items() if not any(re.search(rule, k) for rule in rules)}
            for key, (name, rows) in CUT.get(path.name, {}).items():
                dtype, array = kept.pop(key)
                kept[name] = (dtype, array[rows])
            write(target.with_suffix(".k3g"), compress(kept, {}, streams if relative.parts[0] == "ops" else []))
        elif path.suffix == ".json":
            compact = json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False).encode()
            write(target.with_name(target.name + ".xz"), lzma.compress(compact, preset=9))
        elif relative.parts[-2:-1] == ("images",):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def write(path: Path, content: bytes) -> None:
    """Write and report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{len(content):>10,}  {path.name}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("pack")
    command.add_argument("source", type=Path)
    command.add_argument("--out", type=Path, default=gd.ROOT)
    command = commands.add_parser("unpack")
    command.add_argument("name", choices=CHECKPOINTS)
    command.add_argument("target", type=Path)
    commands.add_parser("list")
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.source, args.out)
    elif args.command == "unpack":
        args.target.mkdir(parents=True, exist_ok=True)
        gd.write_checkpoint(args.name, args.target)
    else:
        for path in sorted(gd.ROOT.rglob("*")):
            if path.is_file():
                print(f"{path.stat().st_size:>10,}  {path.relative_to(gd.ROOT)}")


if __name__ == "__main__":
    main()
