"""What the state-copy tests share: layers, caches with guarded gaps, a recording compiler, a Triton device of fakes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from k3_ascend import state_copy
from k3_ascend.state_copy.compiler import ContractCompiler, Launch, Variant
from k3_ascend.state_copy.layout import ALIGNMENT, WORDS, Layout

SHAPE = (6, 3, 8, 16)  # N, H, V, K with V != K: a transposed state shows


class Layer(state_copy.StateCopyLayer):
    """A KDA layer as far as the state copy sees it."""

    def __init__(self, prefix: str, recurrent: Tensor | None) -> None:
        self.prefix = prefix
        self.kv_cache: Any = [] if recurrent is None else (torch.zeros(len(recurrent), 4), recurrent)


def cache_of(
    shape: Sequence[int] = SHAPE,
    dtype: torch.dtype = torch.float32,
    *,
    gap: int = 48,
    offset: int = 0,
    inner: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Tensor:
    """A cache of random elements in an allocation of other random bits: gap elements after each payload.

    offset: elements before the first page. inner: strides of [H, V, K] where they are not dense.
    """
    generator = torch.Generator().manual_seed(seed)
    dense = torch.empty(shape, device="meta").stride()[1:]
    strides = tuple(dense if inner is None else inner)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape[1:], strides, strict=True))
    page = extent + gap
    count = offset + page * shape[0]
    bits = torch.randint(-128, 128, (count * dtype.itemsize,), generator=generator, dtype=torch.int8)
    raw = aligned(count * dtype.itemsize)
    raw.copy_(bits.view(torch.uint8))
    return raw.view(dtype).to(device).as_strided(tuple(shape), (page, *strides), offset)


def aligned(size: int) -> Tensor:
    """uint8 [size] of zeros at an address that is a multiple of 64, as torch's CPU allocator gives it."""
    raw = torch.zeros(size, dtype=torch.uint8)
    assert raw.data_ptr() % 64 == 0
    return raw


def bits(tensor: Tensor) -> Tensor:
    """Elements as integers on the CPU: NaN equals itself."""
    return tensor.detach().contiguous().cpu().view(WORDS[tensor.element_size()])


def whole(cache: Tensor) -> Tensor:
    """A copy of every byte of a cache's allocation, gaps included."""
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage).clone().cpu()


def gathered(cache: Tensor, indices: Sequence[int], flags: Sequence[bool] | None = None) -> Tensor:
    """What a gather must give, row by row."""
    out = torch.zeros((len(indices), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    for row, index in enumerate(indices):
        if 0 <= index < cache.shape[0] and (flags is None or flags[row]):
            out[row] = cache[index]
    return out


class Recorder(ContractCompiler):
    """The contracts, recording every compilation and launch; it can fail or meddle on request."""

    def __init__(self, fail: Callable[[Variant, Layout], None] | None = None) -> None:
        self.compiled: list[tuple[Variant, Layout]] = []
        self.launched: list[tuple[Variant, tuple[Tensor, ...]]] = []
        self.synchronised = 0
        self.hook_table: dict[str, Any] = {}
        self.launch_hook: str | None = None
        self.fail = fail

    def compile(
        self, variant: Variant, layout: Layout, cache: Tensor, indices: Tensor, flags: Tensor, packed: Tensor
    ) -> Launch:
        assert cache.shape[0] == 1, "live cache must not be compiled on"
        assert cache.data_ptr() % ALIGNMENT == layout.alignment
        assert indices.tolist() == [0]
        assert flags.tolist() == [True]
        assert self.synchronised == len(self.compiled) // 4, "one synchronisation a layout, at its end"
        if self.fail is not None:
            self.fail(variant, layout)
        self.compiled.append((variant, layout))
        inner = super().compile(variant, layout, cache, indices, flags, packed)
        return _RecordedLaunch(self, variant, inner)

    def hooks(self) -> dict[str, Any]:
        return dict(self.hook_table)

    def synchronize(self, device: torch.device) -> None:
        self.synchronised += 1


class _RecordedLaunch:
    def __init__(self, recorder: Recorder, variant: Variant, inner: Launch) -> None:
        self.recorder, self.variant, self.inner = recorder, variant, inner

    def __call__(self, cache: Tensor, indices: Tensor, flags: Tensor | None, packed: Tensor) -> None:
        self.recorder.launched.append((self.variant, (cache, indices, packed) if flags is None else
                                       (cache, indices, flags, packed)))  # fmt: skip
        self.inner(cache, indices, flags, packed)

    def hooked(self) -> str | None:
        return self.recorder.launch_hook


def publish(
    cache: Tensor, *, rows: int = 64, generation: str = "A2", compiler: Any = None, name: str = "model.layers.0.kda"
) -> state_copy.StateCopy:
    """The plan of one layer on a cache."""
    layer = Layer(name, cache)
    state_copy.initialise({name: layer}, max_num_seqs=rows, compiler=compiler, generation=lambda _: generation)
    return state_copy.of(layer)


def load_kernels(path: Path, source: str) -> Any:
    """A copy of the kernel module from changed source (Triton reads a kernel's source from its file)."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeDevice:
    """Triton's own JIT before a compiler and a driver that are fakes: what is compiled runs in Triton's interpreter.

    The JIT function, its binder, specialisation and cache are the real ones, so the number of compilations is what a
    device would see. compiled: (kernel name, signature) of every compilation.
    """

    def __init__(self) -> None:
        self.compiled: list[tuple[str, dict[str, str]]] = []
        self.streams: list[int] = []
        self.stream = 1
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"num_vectorcore": 5, "max_shared_mem": 1 << 20})

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None) -> int:
        return self.stream

    def get_current_target(self) -> Any:
        from triton.backends import backends
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", "Ascend910B3", 0) if "ascend" in backends else GPUTarget("cuda", 90, 32)

    def compile(self, src: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        self.compiled.append((src.fn.__name__, dict(src.signature)))
        return FakeCompiled(self, src.fn, dict(src.constants))


class FakeCompiled:
    """A compiled kernel with the two ways a real one can be launched."""

    function = packed_metadata = None

    def __init__(self, device: FakeDevice, fn: Any, constants: dict[Any, Any]) -> None:
        self.device, self.fn, self.constants = device, fn, constants

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *_: Any) -> None:
        return None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def runner(*args: Any, stream: int | None = None) -> None:
            self.run(*grid, stream, None, None, None, None, None, *args)

        return runner

    def run(self, x: int, y: int, z: int, stream: int, _f: Any, _p: Any, _m: Any, _e: Any, _x: Any, *args: Any) -> None:
        self.device.streams.append(stream)
        if len(args) < len(self.fn.arg_names):  # before 3.3 launchers take no constexprs
            rest = iter(args)
            args = tuple(self.constants[p.name] if p.is_constexpr else next(rest) for p in self.fn.params)
            assert next(rest, None) is None
        interpret(self.fn, (x, y, z), args)


def interpret(fn: Any, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
    """Run a JIT function's Python source in Triton's interpreter, on the tensors themselves (no copies).

    AssertionError, instead of a crash, where a load or a store leaves the allocations of the arguments.
    """
    from triton.runtime import interpreter

    class InPlace(interpreter.GridExecutor):
        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
            return list(args_dev), dict(kwargs)

        def _restore_args_dev(self, *_: Any) -> None:
            pass

    storages = [a.untyped_storage() for a in args if isinstance(a, Tensor)]
    ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
    builder = interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store

    def guard(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data.astype(bool)].astype("uint64")
        inside = sum(((addresses >= begin) & (addresses < end)).astype(int) for begin, end in ranges)
        assert (inside > 0).all() if len(addresses) else True, "an access outside every allocation"

    def guarded_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        guard(ptrs, mask)
        return load(ptrs, mask, *rest)

    def guarded_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard(ptrs, mask)
        return store(ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = guarded_load, guarded_store
    try:
        InPlace(fn.fn, fn.arg_names, grid)(*args)
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


@contextmanager
def fake_triton(monkeypatch: Any) -> Iterator[FakeDevice]:
    """Triton's JIT on a fake device for the length of a test; compiled kernels of the state copy are forgotten."""
    import triton

    from k3_ascend.kernels import state_copy as kernels

    device = FakeDevice()
    driver = SimpleNamespace(active=device)
    monkeypatch.setattr(triton.compiler, "compile", device.compile)
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(triton.runtime.jit, "driver", driver)
    forget(kernels)
    try:
        yield device
    finally:
        forget(kernels)


def forget(kernels: Any) -> None:
    """Drop what the JIT functions of a module have compiled."""
    for name in ("gather_pages", "scatter_pages", "gather_runs", "scatter_runs"):
        fn = getattr(kernels, name)
        fn.device_caches.clear() if hasattr(fn, "device_caches") else fn.cache.clear()
        fn.binder = None
