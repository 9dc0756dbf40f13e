"""What the layers hand to the kernels passes the kernels' own checks of shapes, dtypes and strides.

The model runs in bf16 with the Triton launchers it would use on a GPU, but nothing is launched: every kernel is
replaced by a note of its name. A call that a launcher refuses fails here, not on the first GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from k3_core.checkpoint import CheckpointReader, write_tiny
from k3_core.operators import CallSpec
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.kda_metadata import Decode, KdaMetadata, Verify
from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu
from k3_core.vllm.serving.warmup import Limits
from k3_core.vllm.testing.ranks import Group, bind_caches, build, fill, groups, one_prompt
from k3_core.vllm.testing.suite_ranks import VendorSuite
from k3_core.vllm.testing.vendor import settle

#: What makes the host wait for the device, and what a captured graph could not replay.
HOST_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.nonzero, torch.nonzero,
    torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
}  # fmt: skip


class NoHostReads(TorchFunctionMode):
    """Any value that is read back to the host is an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST_READS, f"{getattr(func, '__name__', func)} waits for the device"
        return func(*args, **(kwargs or {}))


def speculation(drafts: int) -> dict[str, Any]:
    """Engine options for that many draft tokens a request, taken from the text itself."""
    if not drafts:
        return {}
    method = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    return {"speculative_config": method, "enable_prefix_caching": False}


class LaunchSuite(VendorSuite):
    """Needs Triton beside vLLM.

    Attributes:
        arch: the architecture for which layers choose.
        prompt_parts: parts of kernel names that a prompt through the tiny Kimi K3 must reach.
        step_kernels, verify_kernels: kernels that the steps of the warm-up must reach, and those with drafts.
    """

    arch: ClassVar[str]
    prompt_parts: ClassVar[tuple[str, ...]]
    step_kernels: ClassVar[frozenset[str]]
    verify_kernels: ClassVar[frozenset[str]]

    @pytest.fixture
    def chosen_for_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Layers choose what they would choose on ``arch``."""
        dispatch = self.vendor.module("dispatch")

        def choose(name: str, dtype: Any, sizes: Any, options: Any = None, want: str | None = None) -> Any:
            spec = CallSpec(name, "cuda", dtype, self.arch, dict(sizes), dict(options or {}))
            return dispatch.registry().choose(spec, want).implementation

        monkeypatch.setattr(dispatch, "choose", choose)

    @pytest.fixture
    def launched(self, chosen_for_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Names of the kernels that would have been launched."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import KernelInterface

        names: list[str] = []

        def note(self: Any, grid: Any) -> Any:
            name = getattr(self, "__name__", None) or self.fn.__name__
            return lambda *args, **named: names.append(name)

        monkeypatch.setattr(KernelInterface, "__getitem__", note)
        monkeypatch.setattr(InterpretedFunction, "__getitem__", note, raising=False)
        return names

    @pytest.fixture
    def variants(self, chosen_for_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
        """Variants of the kernels that would have been launched."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import KernelInterface

        from k3_core.testing.variants import variant

        met: set[Any] = set()

        def note(kernel: Any, grid: Any) -> Any:
            return lambda *args, **named: met.add(variant(kernel, args, named))

        monkeypatch.setattr(KernelInterface, "__getitem__", note)
        monkeypatch.setattr(InterpretedFunction, "__getitem__", note, raising=False)
        return met

    def as_on_a_gpu(self, model: Any) -> None:
        """Let the layers of a model that was built on a CPU use the vendor's kernels everywhere."""

    def make(self, folder: Path, **options: Any) -> Any:
        """A loaded bf16 text model."""
        with groups(Group(), Group()):
            config = settle(folder, dtype="bfloat16", **options)
            model = build(self.vendor, config, CheckpointReader(folder).config)
            fill(model)
        return model

    @pytest.mark.parametrize("tokens", [1, 17, 130])
    def test_a_prompt_reaches_every_kernel(self, tokens: int, tiny: Path, launched: list[str]) -> None:
        from vllm.forward_context import set_forward_context

        model = self.make(tiny)
        launched.clear()
        bind_caches(model)
        hidden = torch.zeros(tokens, model.config.text.hidden_size, dtype=torch.bfloat16)
        metadata = one_prompt(model, tokens)
        context = set_forward_context(metadata, model.vllm_config, slot_mapping={})
        with groups(Group(), Group()), torch.no_grad(), context:
            out = model.model(hidden, None)
        assert out.shape == hidden.shape
        names = " ".join(launched)
        for part in self.prompt_parts:
            assert part in names, f"no kernel named like {part} in {sorted(set(launched))}"
        # attention mix and MLP mix of 5 layers, and the output mix
        assert sum("attn_res" in name for name in launched) == 11

    def test_one_layer_of_each_kind_launches_every_variant(
        self, tmp_path: Path, variants: set[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a warm-up launches equals what the whole model does, one layer's experts having wide scales.

        Mutants: kinds that do not tell wide scales, blocks, or what a layer is made of apart.
        """
        from vllm.forward_context import set_forward_context

        from k3_core.vllm.serving.experts import RearrangedStore
        from k3_core.vllm.serving.stack import TextStack

        warm_up = self.vendor.module("warmup").WARM_UP
        model = self.make(write_tiny(tmp_path / "13", "k3-13", seed=11))
        self.as_on_a_gpu(model)
        layers = dict(model.model.own_layers())
        kinds = {index: model.model.kind(index, layer) for index, layer in layers.items()}
        wide = next(i for i in layers if layers[i].is_moe and kinds[i] in [kinds[j] for j in range(i)])
        layers[wide].feed_forward.experts.weights().wide_scales = True
        counts, longest = warm_up.token_counts(model.config, Limits(300, 8, 0)), 300

        def met() -> tuple[int, set[Any]]:
            variants.clear()
            context = set_forward_context(None, model.vllm_config)
            with groups(Group(), Group()), torch.no_grad(), context:
                ran = warm_up.run_tokens(model.model, counts, longest, torch.bfloat16, torch.device("cpu"))
            return len(ran), set(variants)

        with monkeypatch.context() as all_layers:
            all_layers.setattr(TextStack, "kind", lambda model, index, layer: index)
            number, whole = met()
        assert number == len(layers)
        assert len(whole) > 20
        number, short = met()
        assert number < len(layers)
        assert short == whole
        assert list(model.model.running()) == list(layers)
        kind = TextStack.kind
        mutants: list[tuple[Any, str, Any]] = [
            (RearrangedStore, "variant_key", lambda store: ()),
            (TextStack, "kind", lambda *of: (kind(*of)[0][:2], kind(*of)[1])),
            (TextStack, "kind", lambda *of: kind(*of)[0]),
        ]
        for owner, name, blind in mutants:
            with monkeypatch.context() as broken:
                broken.setattr(owner, name, blind)
                assert met()[1] < whole

    @pytest.mark.parametrize("drafts", [0, 3])
    def test_every_kind_of_step_passes_the_kernels_checks(self, drafts: int, tiny: Path, launched: list[str]) -> None:
        warm_up = self.vendor.module("warmup").WARM_UP
        model = self.make(tiny, **speculation(drafts))
        layer = next(m for m in model.modules() if isinstance(m, KdaLayer))
        limits = Limits(max_num_batched_tokens=1100, max_num_seqs=8, num_spec=drafts)
        launched.clear()
        warm_up.run_kda(layer, limits, torch.bfloat16, torch.device("cpu"))
        wanted = self.step_kernels | (self.verify_kernels if drafts else frozenset())
        assert wanted <= set(launched), sorted(set(launched))
        # as vLLM's pages lay them out: rows of a page much longer than the state, the window first
        conv, recurrent = layer.get_state_shape()
        page = 3 * (conv[0] * conv[1] * 2 + recurrent[0] * recurrent[1] * recurrent[2] * 4)
        pages = torch.zeros(6, page // 16 * 16, dtype=torch.int8)
        bind: Any = layer.bind_kv_cache
        bind(pages.view(6, 1, 1, -1))
        qkv, z, beta, gate = layer.project(torch.zeros(8, 256, dtype=torch.bfloat16))
        for metadata in warm_up.steps(layer, limits, torch.device("cpu")):
            if metadata.step_tokens + metadata.prefill_tokens <= 8:
                layer._run(metadata, qkv, z, beta, gate, torch.empty_like(z))

    @pytest.mark.parametrize("drafts", [0, 3])
    def test_decoding_and_verifying_read_nothing_back_to_the_host(
        self, drafts: int, tiny: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every layer and mix of a decoding step, as a graph would capture it; vLLM's attention call is left out."""
        from vllm.forward_context import set_forward_context

        rows = 3
        model = self.make(tiny, **speculation(drafts))
        bind_caches(model)
        monkeypatch.setattr(
            LatentAttentionOnCpu, "forward", lambda layer, q, *rest, **named: q.new_zeros(q.shape[0], q.shape[1] * 32)
        )
        slots = torch.tensor([1, 2, 0], dtype=torch.int32)
        tokens = rows * (1 + drafts)
        if drafts:
            ends = torch.arange(rows + 1, dtype=torch.int32) * (1 + drafts)
            wide = slots.unsqueeze(1).expand(rows, 1 + drafts).contiguous()
            step = KdaMetadata(tokens, 0, verify=Verify(wide, torch.ones(rows, dtype=torch.int32), ends))
        else:
            step = KdaMetadata(tokens, 0, decode=Decode(slots))
        metadata: dict[str, Any] = {m.prefix: step for m in model.modules() if isinstance(m, KdaLayer)}
        metadata |= {m.prefix: object() for m in model.modules() if isinstance(m, LatentAttentionOnCpu)}
        hidden = torch.zeros(tokens, model.config.text.hidden_size, dtype=torch.bfloat16)
        launched.clear()
        context = set_forward_context(metadata, model.vllm_config, slot_mapping={})
        with groups(Group(), Group()), torch.no_grad(), context, NoHostReads():
            model.model(hidden, None)
        assert any("verify" in name or "decode" in name for name in launched)
        with pytest.raises(AssertionError, match="waits for the device"), NoHostReads():
            hidden.sum().item()

    def test_kimi_linear_without_packed_experts_uses_the_library(self, linear: Path, launched: list[str]) -> None:
        model = self.make(linear)
        experts = {layer.feed_forward.operator.name for layer in model.model.layers if layer.is_moe}
        assert experts == {self.vendor.module("dispatch").LIBRARY}
        layer = next(m for m in model.modules() if isinstance(m, KdaLayer))
        limits = Limits(max_num_batched_tokens=130, max_num_seqs=8, num_spec=0)
        launched.clear()
        self.vendor.module("warmup").WARM_UP.run_kda(layer, limits, torch.bfloat16, torch.device("cpu"))
        assert any("chunk" in name or "kda" in name for name in launched)
