"""The worker's start-up: choose a plan for each layer, prepare, seal, publish. All layers, or none and a RuntimeError.

Every variant that serving can meet is compiled here, on scratch memory: compiling while a request waits would stall it
for seconds, and nothing can be compiled later. A failure names the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_ascend.state_copy import compiler as _compiler
from k3_ascend.state_copy import configuration
from k3_ascend.state_copy import layout as _layout
from k3_ascend.state_copy.compiler import Compiler, Direction, Launch, Variant
from k3_ascend.state_copy.layout import ALIGNMENT, WORDS, Layout, PlanKind
from k3_ascend.state_copy.plan import StateCopy, StateCopyLayer, Table

logger = logging.getLogger("vllm.plugins.k3")

INDEX_DTYPES = (torch.int32, torch.int64)
VARIANTS = tuple((d, i) for d in Direction for i in INDEX_DTYPES)


@dataclass(frozen=True)
class Published:
    """What a start-up published: layers, their tables (shared ones once) and the reason of each table's plan."""

    layers: tuple[str, ...]
    tables: tuple[Table, ...]
    reasons: tuple[str, ...]


def initialise(
    layers: Mapping[str, StateCopyLayer],
    *,
    max_num_seqs: int,
    compiler: Compiler | None = None,
    generation: Callable[[torch.device], str] = _layout.generation,
) -> Published:
    """Publish the state copy of all layers, whose caches are bound.

    max_num_seqs: most rows a call can have. compiler, generation: for tests and other devices; by default the device's
    own. RuntimeError naming the layer: unbound cache, illegal layout, failed compilation or launch, wrong bytes on
    scratch, or a configuration that changed meanwhile. Then no layer has a plan, whatever it had before.
    """
    withdraw(layers)
    if max_num_seqs < 1:
        raise RuntimeError(f"max_num_seqs is {max_num_seqs}; the state copy needs at least one row")
    before = configuration.snapshot()
    chosen = {name: _chosen(name, layer, generation) for name, layer in layers.items()}
    groups: dict[tuple[PlanKind, Layout], list[str]] = {}
    for name, (choice, found, _) in chosen.items():
        groups.setdefault((choice.kind, found), []).append(name)
    tables = {}
    for key, names in groups.items():
        device = chosen[names[0]][2]
        tables[key] = _prepare(names[0], *key, device, max_num_seqs, compiler or _compiler.default(device))
    _seal(before, tables, groups)
    for name, (choice, found, _) in chosen.items():
        layers[name].state_copy = StateCopy(name, tables[choice.kind, found][0])
    reasons = tuple(chosen[names[0]][0].reason for names in groups.values())
    for (kind, found), names, reason in zip(groups, groups.values(), reasons, strict=True):
        logger.info("K3 state copy: %d layers, plan %s (%s), cache %s", len(names), kind, reason, found.describe())
    return Published(tuple(layers), tuple(table for table, _ in tables.values()), reasons)


def withdraw(layers: Mapping[str, StateCopyLayer]) -> None:
    """Take the plans away from the layers: they serve nothing until the next start-up."""
    for layer in layers.values():
        layer.state_copy = None


def _chosen(
    name: str, layer: StateCopyLayer, generation: Callable[[torch.device], str]
) -> tuple[_layout.Choice, Layout, torch.device]:
    try:
        cache = layer.recurrent_cache()
        found = Layout.of(cache)
        return _layout.choose(found, generation(cache.device)), found, cache.device
    except Exception as error:
        raise RuntimeError(f"state copy of layer {name}: {error}") from error


def _prepare(
    name: str, kind: PlanKind, found: Layout, device: torch.device, max_rows: int, compiler: Compiler
) -> tuple[Table, tuple[Compiler, dict[str, object]]]:
    """The four variants of one layout, compiled and launched on scratch, checked, the scratch freed.

    Returns the unsealed table, and the compiler with the JIT hooks it had before.
    """
    hooks = compiler.hooks()
    launches: dict[tuple[Direction, torch.dtype], Launch] = {}
    results: list[tuple[Variant, Tensor, Tensor]] = []
    try:
        cache, pattern = _scratch(found, device)
        for direction, index_dtype in VARIANTS:
            variant = Variant(kind, direction, index_dtype)
            launch, result = _prepare_one(compiler, variant, found, cache, pattern)
            launches[direction, index_dtype] = launch
            results.append((variant, *result))
        compiler.synchronize(device)
        for variant, got, wanted in results:
            if not torch.equal(got, wanted):
                raise RuntimeError(f"{variant} copied wrong bytes on scratch memory")
    except Exception as error:
        raise RuntimeError(f"state copy of layer {name} ({found.describe()}): {error}") from error
    return Table(kind, found, max_rows, launches), (compiler, hooks)


def _prepare_one(
    compiler: Compiler, variant: Variant, found: Layout, cache: Tensor, pattern: Tensor
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """Compile one variant, then launch the stored object once more; returns it with what it wrote and should have.

    The stored object is launched as serving does, with the argument order it was prepared with.
    """
    indices = torch.zeros(1, dtype=variant.index_dtype, device=cache.device)
    flags = torch.ones(1, dtype=torch.bool, device=cache.device)
    word = WORDS[cache.element_size()]
    packed = pattern.clone() if variant.direction is Direction.SCATTER else torch.zeros_like(pattern)
    cache.copy_(pattern)
    launch = compiler.compile(variant, found, cache, indices, flags, packed)
    if variant.direction is Direction.GATHER:
        packed.zero_()
        launch(cache, indices, flags, packed)
        return launch, (packed.view(word), pattern.view(word))
    cache.zero_()
    launch(cache, indices, None, packed)
    return launch, (cache.clone(memory_format=torch.contiguous_format).view(word), pattern.view(word))


def _scratch(found: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """One page of the layout's inner strides and alignment class, never live cache; and bytes to copy through it.

    The page has a stride(0) of its own (there is one page only); compiled variants carry the layout's as a constant.
    """
    size = found.dtype.itemsize
    extent = 1 + sum((n - 1) * step for n, step in zip(found.shape[1:], found.stride[1:], strict=True))
    raw = torch.zeros(extent * size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = (found.alignment - raw.data_ptr()) % ALIGNMENT
    flat = raw[start : start + extent * size].view(found.dtype)
    cache = flat.as_strided((1, *found.shape[1:]), (extent, *found.stride[1:]), flat.storage_offset())
    count = found.payload * size
    pattern = (torch.arange(count, dtype=torch.int32) % 113).to(torch.int8)  # made on the host: no device arithmetic
    return cache, pattern.view(found.dtype).view(1, *found.shape[1:]).to(device)


def _seal(
    before: dict[str, str],
    tables: Mapping[tuple[PlanKind, Layout], tuple[Table, tuple[Compiler, dict[str, object]]]],
    groups: Mapping[tuple[PlanKind, Layout], list[str]],
) -> None:
    """Seal every table if nothing that compilation depends on moved since preparation began."""
    names = {key: layers[0] for key, layers in groups.items()}
    changed = configuration.drift(before, configuration.snapshot())
    if changed and tables:
        first = next(iter(names.values()))
        raise RuntimeError(
            f"state copy of layer {first}: the compiler configuration changed while kernels were prepared "
            f"({', '.join(changed)}); nothing may set these after the worker has started"
        )
    for key, (table, (compiler, hooks)) in tables.items():
        now = compiler.hooks()
        appeared = sorted(name for name in now if now[name] != hooks.get(name))
        appeared += [hook for launch in table.launches.values() if (hook := launch.hooked()) is not None]
        if appeared:
            raise RuntimeError(
                f"state copy of layer {names[key]}: a JIT hook appeared while kernels were prepared: "
                f"{', '.join(appeared)}"
            )
    for table, _ in tables.values():
        table.sealed = True
