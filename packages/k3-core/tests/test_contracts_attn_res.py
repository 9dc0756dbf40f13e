"""AttnRes beyond the goldens: the schedule against the stack written out, pipeline stages, the lazy form, refusals."""

import pytest
import torch
from torch import Tensor

from k3_core.contracts import attn_res
from k3_core.errors import ConfigError

EPS = 1e-5


class Toy:
    """A stack of linear sublayers with AttnRes weights, for following the data flow bit by bit."""

    def __init__(self, layers: int, block: int, hidden: int = 32, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(layers)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.layers, self.block = layers, block
        self.sublayers = normal(2 * layers, hidden, hidden) / hidden**0.5
        self.norms, self.projections = 1 + 0.2 * normal(2 * layers + 1, hidden), normal(2 * layers + 1, hidden)
        self.embedding = normal(5, hidden)

    def mix_weights(self, sublayer: int) -> tuple[Tensor, Tensor]:
        return self.norms[sublayer], self.projections[sublayer]

    def reference(self) -> tuple[Tensor, list[Tensor]]:
        """The order of the released code: the bank is a growing list."""
        bank: list[Tensor] = []
        prefix: Tensor | None = self.embedding

        def mixed(sublayer: int) -> Tensor:
            assert prefix is not None
            stacked = torch.stack(bank, 1) if bank else prefix.new_zeros(len(prefix), 0, prefix.shape[1])
            return attn_res.mix(stacked, prefix, *self.mix_weights(sublayer), EPS)

        for i in range(self.layers):
            h = mixed(2 * i)
            if i % self.block == 0:
                bank.append(prefix)
                prefix = None
            a = h @ self.sublayers[2 * i]
            prefix = a if prefix is None else prefix + a
            prefix = prefix + mixed(2 * i + 1) @ self.sublayers[2 * i + 1]
        return mixed(2 * self.layers), bank

    def lazy(self, cuts: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """The lazy form over pipeline stages cut before the given layers; banks start as NaN."""
        schedule = attn_res.Schedule(self.layers, self.block)
        prefix, delta = self.embedding.clone(), None
        bank = torch.zeros(5, 0, prefix.shape[1], dtype=prefix.dtype)
        for start, end in zip((0, *cuts), (*cuts, self.layers), strict=True):
            stage = schedule.stage(start, end)
            if delta is not None:
                prefix, delta = prefix + delta, None
            assert (prefix.shape, bank.shape) == stage.payload_shapes(5, prefix.shape[1])
            received, bank = bank, torch.full((5, stage.num_slots, prefix.shape[1]), torch.nan, dtype=prefix.dtype)
            bank[:, : stage.received_blocks] = received
            for i in range(start, end):
                slot = schedule.write_index(i)
                blocks = schedule.attn_blocks(i)
                h = attn_res.attn_res(prefix, delta, bank, blocks, slot, *self.mix_weights(2 * i), EPS)
                a = h @ self.sublayers[2 * i]
                # At a write layer the prefix restarts as the attention output; the old one lives in the bank only.
                prefix, delta = (a, None) if slot is not None else (prefix, a)
                blocks = schedule.mlp_blocks(i)
                h = attn_res.attn_res(prefix, delta, bank, blocks, None, *self.mix_weights(2 * i + 1), EPS)
                delta = h @ self.sublayers[2 * i + 1]
        weights = self.mix_weights(2 * self.layers)
        return attn_res.attn_res(prefix, delta, bank, schedule.output_blocks, None, *weights, EPS), bank


@pytest.mark.parametrize(("layers", "block"), [(13, 3), (25, 12), (4, 1), (5, 9)])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 2)])
def test_lazy_form_and_stages_equal_the_released_order(layers: int, block: int, cuts: tuple[int, ...]) -> None:
    toy = Toy(layers, block)
    expected, blocks = toy.reference()
    out, bank = toy.lazy(cuts)
    assert torch.equal(out, expected)
    assert torch.equal(bank, torch.stack(blocks, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_blocks_is_the_prefix_itself(dtype: torch.dtype) -> None:
    prefix = torch.randn(3, 16).to(dtype)
    bank = torch.full((3, 2, 16), torch.nan, dtype=dtype)
    weights = torch.randn(16), torch.randn(1, 16)
    mixed = attn_res.mix(bank[:, :0], prefix, *weights, EPS)
    assert torch.equal(mixed, prefix)
    assert mixed.data_ptr() != prefix.data_ptr()
    out = attn_res.attn_res(prefix, None, bank, 0, 0, *weights, EPS)
    assert torch.equal(out, prefix)
    assert out.data_ptr() != prefix.data_ptr()
    assert torch.equal(bank[:, 0], prefix)
    assert torch.isnan(bank[:, 1]).all()


def test_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    bank, prefix, w, p = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((4, 3, 8), (4, 8), (8,), (8,))
    )
    expected = torch.zeros_like(prefix)
    for t in range(4):
        sources = [*bank[t], prefix[t]]
        logits = torch.stack([(s / (s.square().mean() + EPS).sqrt() * w * p).sum() for s in sources])
        for share, source in zip(torch.softmax(logits, 0), sources, strict=True):
            expected[t] += share * source
    torch.testing.assert_close(attn_res.mix(bank, prefix, w, p, EPS), expected, atol=1e-13, rtol=0)


def test_padded_strides_and_rounded_sum() -> None:
    """Rows inside wider storage, as a kernel meets them; the sum is rounded once and stored."""
    storage = torch.randn(4, 3, 40).bfloat16()
    bank, prefix, delta = storage[:, :2, :32], storage[:, 2, :32], torch.randn(4, 40).bfloat16()[:, :32]
    tail = storage[:, :, 32:].clone()
    expected_prefix = prefix + delta
    weights = torch.randn(32), torch.randn(32)
    expected = attn_res.mix(bank.contiguous(), expected_prefix, *weights, EPS)
    out = attn_res.attn_res(prefix, delta, bank, 2, None, *weights, EPS)
    assert torch.equal(prefix, expected_prefix)
    assert torch.equal(out, expected)
    assert out.is_contiguous()
    assert torch.equal(storage[:, :, 32:], tail)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        attn_res.Schedule(13, 0)
    with pytest.raises(ConfigError, match="num_layers"):
        attn_res.Schedule(0, 3)
    with pytest.raises(ConfigError, match="stage"):
        attn_res.Schedule(13, 3).stage(5, 14)
    with pytest.raises(IndexError, match="layer 13"):
        attn_res.Schedule(13, 3).attn_blocks(13)
    with pytest.raises(ValueError, match=r"\[T, n, H\]"):
        attn_res.mix(torch.zeros(2, 1, 8), torch.zeros(3, 8), torch.zeros(8), torch.zeros(8), EPS)
    with pytest.raises(ValueError, match="num_blocks"):
        attn_res.attn_res(torch.zeros(2, 8), None, torch.zeros(2, 1, 8), 2, None, torch.zeros(8), torch.zeros(8), EPS)
