"""Compiled binaries on disk, for compilers that keep none themselves (Triton has a cache of its own).

One file a binary, named by a hash of everything that decides it, holding a checksum before the content. Written beside
its place and renamed: a reader sees all of it or nothing. A file that is damaged, or cannot be read or written, costs a
compilation and nothing else. ``K3_CACHE_DIR`` is the folder, by default ``k3`` below the user's cache folder; "" keeps
nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from k3_core.operators import compiling

logger = logging.getLogger("vllm.plugins.k3")
DIGEST = 32  # bytes of a SHA-256


def folder() -> Path | None:
    """Where binaries are kept, or None for nowhere."""
    asked = os.environ.get("K3_CACHE_DIR")
    if asked is not None:
        return Path(asked) if asked else None
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "k3"


def stored(compiler: str, parts: Iterable[str], make: Callable[[], bytes]) -> bytes:
    """What ``make`` gives, from disk if it has been made of the same ``parts`` before; noted in ``compiling``.

    parts: everything that decides the binary: source, constants, architecture, versions. Raises what ``make`` raises.
    """
    path = _path(compiler, parts)
    with compiling.timing(compiler) as spent:
        content = None if path is None else _read(path)
        spent.cached = content is not None
        if content is None:
            content = make()
            if path is not None:
                _write(path, content)
    return content


def _path(compiler: str, parts: Iterable[str]) -> Path | None:
    with suppress(RuntimeError):  # no home
        where = folder()
        name = hashlib.sha256()
        for part in (compiler, *parts):
            name.update(f"{len(part)}:{part}".encode())
        return None if where is None else where / f"{compiler.lower()}-{name.hexdigest()}.bin"
    return None


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST]:
        return data[DIGEST:]
    logger.warning("Kimi K3: %s is damaged and is made anew", path)
    return None


def _write(path: Path, content: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, path)
    except OSError as error:
        logger.info("Kimi K3: %s is not kept (%s)", path, error)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
