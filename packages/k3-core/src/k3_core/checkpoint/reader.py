"""Streaming a checkpoint, one shard at a time, each rank reading only its part.

Tensors are views of the memory-mapped shard (safetensors), so streaming allocates nothing but cut columns. A shard is
mapped again after every `REMAP_BYTES`, so that consumed pages do not pile up in the process's resident size either.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from k3_core.checkpoint.a_log import normalize_a_log
from k3_core.checkpoint.slicing import WHOLE, Shard
from k3_core.checkpoint.verify import Manifest, check_values, verify_headers
from k3_core.config import K3Config
from k3_core.errors import CheckpointError

REMAP_BYTES = 256 << 20


class CheckpointReader:
    """Reads a checkpoint whose headers were verified on construction.

    Args:
        path: checkpoint folder.
        config: what it must hold; None reads the folder's own config.json.
        manifest: what a verification of this folder found, where it was done with other arguments.

    Raises CheckpointError or ConfigError as `verify_headers` does, before any weight is read.
    """

    def __init__(self, path: str | Path, config: K3Config | None = None, *, manifest: Manifest | None = None) -> None:
        self.manifest: Manifest = verify_headers(path, config) if manifest is None else manifest
        self.config: K3Config = self.manifest.config

    def tensors(
        self,
        plan: Mapping[str, Shard] | None = None,
        *,
        wanted: Callable[[str], bool] | None = None,
        copy: bool = False,
        check: bool = True,
        progress: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (released name, tensor), shard after shard in file order. A_log comes normalised: fp32 [heads].

        Args:
            plan: the part of each tensor to read (`slicing.shard_plan`); None reads everything. Tensors of which the
                rank holds nothing are skipped, and shards without any wanted tensor are not opened.
            wanted: further restricts the names.
            copy: yield independent copies. By default tensors are views of the mapped file: keep them only if the
                mapping may stay, and never write to them.
            check: refuse scale bytes that mean NaN (`verify.check_values`); A_log's tail is always checked.
            progress: show a progress bar on stderr, counted in bytes.

        Raises:
            CheckpointError: a value check failed, or a shard vanished or shrank since it was verified.
        """
        chosen = {
            shard: [name for name in names if self._is_chosen(name, plan, wanted)]
            for shard, names in self.manifest.by_shard().items()
        }
        total = sum(self.manifest[name].nbytes for names in chosen.values() for name in names)
        bar = tqdm(total=total, unit="B", unit_scale=True, disable=not progress, desc="checkpoint")
        with bar:
            for shard, names in chosen.items():
                bar.set_postfix_str(shard, refresh=False)
                for name, tensor in self._shard(shard, names, plan or {}, copy, check):
                    yield name, tensor
                    del tensor  # the consumer decides whether the mapping stays
                    bar.update(self.manifest[name].nbytes)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()

    def read(self, name: str, part: Shard = WHOLE) -> Tensor:
        """One tensor (or a part of it) as an independent copy. Raises KeyError for an unknown released name."""
        shard = self.manifest[name].shard
        ((_, tensor),) = self._shard(shard, [name], {name: part}, True, True)
        return tensor

    def _is_chosen(self, name: str, plan: Mapping[str, Shard] | None, wanted: Callable[[str], bool] | None) -> bool:
        if plan is not None and plan[name].is_empty:
            return False
        return wanted is None or wanted(name)

    def _shard(
        self, shard: str, names: list[str], plan: Mapping[str, Shard], copy: bool, check: bool
    ) -> Iterator[tuple[str, Tensor]]:
        for batch in self._batches(names):
            with self._open(shard) as file:
                for name in batch:
                    tensor = self._fetch(file, name)
                    part = plan.get(name, WHOLE).take(tensor)
                    if check and name.endswith(".weight_scale"):
                        check_values(name, part, self.manifest[name], self.config)
                    del tensor
                    yield name, part.clone() if copy else part.contiguous()
                    del part

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        size = 0
        for name in names:
            nbytes = self.manifest[name].nbytes
            if batch and size + nbytes > REMAP_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += nbytes
        if batch:
            yield batch

    def _open(self, shard: str) -> Any:
        try:
            return safe_open(self.manifest.folder / shard, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard}: changed since it was verified ({error}); do not write to it") from error

    def _fetch(self, file: Any, name: str) -> Tensor:
        stored = self.manifest[name]
        try:
            tensor: Tensor = file.get_tensor(stored.stored_name)
        except SafetensorError as error:
            raise CheckpointError(f"{stored.shard}: {stored.stored_name}: cannot be read ({error})") from error
        if name.endswith(".A_log"):  # the whole of it is read: its tail is nobody's part
            heads = self.config.text.linear_attn.num_heads
            tensor = normalize_a_log(tensor, heads, f"{stored.shard}: {stored.stored_name}")
        return tensor
