"""Reading every byte of a checkpoint and checking what only the data can show; the engine of `k3 verify --full`.

Shards are read in parallel, front to back, in large pieces, and each tensor is checked as its bytes pass: routed-expert
scales must not be 255 (NaN), floating-point tensors must be finite, A_log's tail must be zero. Where a checksum is
known (a ``SHA256SUMS`` file, ``<shard>.sha256``, or the metadata the Hugging Face client leaves beside a download) the
file is hashed in the same pass. A finished shard is noted with its size and time of change, so that an interrupted run
resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3_core.checkpoint import Manifest, check_values
from k3_core.checkpoint.headers import StoredTensor
from k3_core.contracts.mxfp4 import NAN_SCALE
from k3_core.errors import CheckpointError

#: Bytes read at a time by each thread; a multiple of every item size.
PIECE = 8 << 20
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_EXPONENT = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}


@dataclass
class ShardResult:
    """What reading one shard gave: its problem, if any, and how it was checked."""

    shard: str
    nbytes: int
    problem: str | None = None
    hashed: bool = False
    resumed: bool = False


@dataclass
class Notes:
    """Which shards were found whole before, by size and time of change. ``path`` None keeps nothing."""

    path: Path | None
    shards: dict[str, list[int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, folder: Path, fresh: bool) -> Notes:
        """The notes about a checkpoint, in the user's cache: a checkpoint folder may be read-only, and is not ours."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = cache / "k3" / "verify" / (hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24] + ".json")
        notes = cls(path)
        if not fresh and path.is_file():
            try:
                notes.shards = json.loads(path.read_text())["shards"]
            except (OSError, ValueError, KeyError, TypeError):
                notes.shards = {}  # a damaged note only costs reading again
        return notes

    def has(self, file: Path) -> bool:
        """Whether this very file was found whole."""
        return self.shards.get(file.name) == _identity(file)

    def add(self, file: Path, identity: list[int]) -> None:
        """Note that ``file`` was found whole while it had ``identity``."""
        with self.lock:
            self.shards[file.name] = identity
            if self.path is None:
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fresh = self.path.with_suffix(".tmp")
                fresh.write_text(json.dumps({"shards": self.shards}))
                fresh.replace(self.path)
            except OSError:
                self.path = None  # no place for notes: the run goes on and cannot be resumed


def _identity(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def checksums(folder: Path, shards: list[str]) -> dict[str, str]:
    """Shard -> SHA-256 in hex, from whatever the folder holds; empty where it holds none."""
    found: dict[str, str] = {}
    for listing in (folder / "SHA256SUMS", folder / "sha256sums.txt"):
        if listing.is_file():
            for line in listing.read_text(errors="replace").splitlines():
                digest, _, name = line.partition(" ")
                if _SHA256.match(digest):
                    found[name.strip().lstrip("*").removeprefix("./")] = digest
    for shard in shards:
        single = folder / f"{shard}.sha256"
        metadata = folder / ".cache" / "huggingface" / "download" / f"{shard}.metadata"
        words = single.read_text(errors="replace").split()[:1] if single.is_file() else []
        if metadata.is_file():  # commit, etag, time: the etag of a large file is its SHA-256
            words += metadata.read_text(errors="replace").split()[1:2]
        for word in filter(_SHA256.match, words):
            found[shard] = word
    return {shard: found[shard] for shard in shards if shard in found}


def scan(
    manifest: Manifest, *, jobs: int, notes: Notes, advance: Callable[[int], None] = lambda nbytes: None
) -> Iterator[ShardResult]:
    """Read and check all shards with ``jobs`` threads; yields one result a shard as each is done.

    ``advance`` is called, from several threads, with the number of bytes that were read or skipped.
    """
    shards = manifest.by_shard()
    sums = checksums(manifest.folder, list(shards))

    def one(shard: str, names: list[str]) -> ShardResult:
        file = manifest.folder / shard
        try:
            identity = _identity(file)
            if notes.has(file):
                advance(identity[0])
                return ShardResult(shard, identity[0], resumed=True)
            _read(manifest, file, names, sums.get(shard), advance)
            notes.add(file, identity)
            return ShardResult(shard, identity[0], hashed=shard in sums)
        except CheckpointError as error:
            return ShardResult(shard, 0, str(error))
        except OSError as error:
            return ShardResult(shard, 0, f"{shard}: cannot be read ({error}); check the disk and fetch the file again")

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, shard, names) for shard, names in shards.items()]):
            yield done.result()


def _read(manifest: Manifest, path: Path, names: list[str], digest: str | None, advance: Callable[[int], None]) -> None:
    """Read one file to its end; raises CheckpointError at the first bad byte."""
    hasher = hashlib.sha256() if digest else None
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        begin = manifest[names[0]].begin if names else path.stat().st_size
        _skip(file, begin, buffer, hasher, advance)
        for name in names:
            _read_tensor(manifest, name, file, buffer, hasher, advance)
        _skip(file, None, buffer, hasher, advance)
    if hasher is not None and hasher.hexdigest() != digest:
        raise CheckpointError(
            f"{path.name}: SHA-256 is {hasher.hexdigest()}, expected {digest}: the file is damaged; fetch it again"
        )


def _skip(file: Any, end: int | None, buffer: bytearray, hasher: Any, advance: Callable[[int], None]) -> None:
    """Read, unchecked, up to position ``end`` or to the end of the file."""
    while end is None or file.tell() < end:
        limit = len(buffer) if end is None else min(len(buffer), end - file.tell())
        read = file.readinto(memoryview(buffer)[:limit])
        if not read:
            return
        if hasher is not None:
            hasher.update(memoryview(buffer)[:read])
        advance(read)


def _read_tensor(
    manifest: Manifest, name: str, file: Any, buffer: bytearray, hasher: Any, advance: Callable[[int], None]
) -> None:
    stored = manifest[name]
    kept = bytearray()  # A_log alone is looked at as a whole
    done = 0
    while done < stored.nbytes:
        piece = memoryview(buffer)[: min(len(buffer), stored.nbytes - done)]
        filled = 0
        while filled < len(piece):
            read = file.readinto(piece[filled:])
            if not read:
                raise CheckpointError(
                    f"{stored.shard}: {stored.stored_name} ends at byte {stored.begin + done + filled} of the file, "
                    f"{stored.nbytes - done - filled} bytes early; the file shrank since its header was read"
                )
            filled += read
        if hasher is not None:
            hasher.update(piece)
        _check_piece(name, stored, piece, done)
        if name.endswith(".A_log"):
            kept += piece
        done += len(piece)
        advance(len(piece))
    if kept and stored.dtype_name == "F32":
        values = torch.frombuffer(kept, dtype=torch.float32).reshape(stored.shape)
        check_values(name, values, stored, manifest.config)


def _check_piece(name: str, stored: StoredTensor, piece: memoryview, offset: int) -> None:
    """Refuse a NaN scale or a value that is not finite, naming the byte; other bytes may hold anything."""
    if name.endswith(".weight_scale"):
        bad = np.frombuffer(piece, np.uint8) == NAN_SCALE
        item, what = 1, "a scale of 255, which is NaN (expected 0..254)"
    elif stored.dtype_name in _EXPONENT:
        kind, mask = _EXPONENT[stored.dtype_name]
        bad = (np.frombuffer(piece, kind) & kind(mask)) == mask
        item, what = np.dtype(kind).itemsize, "a value that is not finite"
    else:
        return
    if bad.any():
        at = offset + int(bad.argmax()) * item
        raise CheckpointError(
            f"{stored.shard}: {stored.stored_name} holds {what} at byte {at} of the tensor, byte {stored.begin + at} "
            f"of the file; the file is damaged or was converted wrongly: fetch it again"
        )
