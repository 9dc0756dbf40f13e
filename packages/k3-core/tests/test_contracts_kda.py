"""KDA beyond the goldens: batching, splitting, extreme gates, speculative verification."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3_core.contracts import kda

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def operands(
    tokens: int, heads: int = 2, key: int = 24, value: int = 40, *, seed: int = 0, gate: tuple[float, float] = (-3, 0)
) -> Operands:
    """Random fp64 q, k [T, N, K], v [T, N, V], g and beta; K and V differ so that a transposed state cannot pass."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(tokens, heads, key), normal(tokens, heads, key), normal(tokens, heads, value)
    uniform = torch.rand(tokens, heads, key, generator=generator, dtype=torch.float64)
    return q, k, v, gate[0] + (gate[1] - gate[0]) * uniform, torch.sigmoid(normal(tokens, heads))


def rows(x: Operands, start: int, stop: int) -> Operands:
    q, k, v, g, beta = (part[start:stop] for part in x)
    return q, k, v, g, beta


def state_like(x: Operands, sequences: int = 1, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (sequences, x[0].shape[1], x[2].shape[2], x[0].shape[2])
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def by_hand(x: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as the module docstring writes it, one head and one token at a time."""
    q, k, v, g, beta = x
    S, out = state.clone(), torch.zeros_like(v)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            query = q[t, h] / (q[t, h].square().sum() + 1e-6).sqrt() / q.shape[2] ** 0.5
            key = k[t, h] / (k[t, h].square().sum() + 1e-6).sqrt()
            S[h] = S[h] * g[t, h].exp()
            S[h] = S[h] + torch.outer(beta[t, h] * (v[t, h] - S[h] @ key), key)
            out[t, h] = S[h] @ query
    return out, S


@pytest.mark.parametrize("run", [kda.recurrent, kda.chunked])
def test_formula(run) -> None:
    x = operands(19)
    state = state_like(x)
    o, final = run(*x, state)
    expected_o, expected_state = by_hand(x, state[0])
    torch.testing.assert_close(o, expected_o, atol=1e-12, rtol=0)
    torch.testing.assert_close(final[0], expected_state, atol=1e-12, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    chunk=st.one_of(st.none(), st.integers(1, 40)),
    initial=st.booleans(),
)
def test_packed_sequences_equal_single_ones(lengths: list[int], padding: int, chunk: int | None, initial: bool) -> None:
    x = operands(sum(lengths) + padding)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    state = state_like(x, len(lengths)) if initial else None
    kept = None if state is None else state.clone()
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    if chunk is None:
        o, final = kda.recurrent(*x, state, cu_seqlens)
    else:
        o, final = kda.chunked(*x, state, cu_seqlens, chunk=chunk)
    for s, length in enumerate(lengths):
        start = torch.zeros_like(final[s]) if state is None else state[s]
        expected_o, expected_state = by_hand(rows(x, bounds[s], bounds[s] + length), start)
        torch.testing.assert_close(o[bounds[s] : bounds[s + 1]], expected_o, atol=1e-11, rtol=0)
        torch.testing.assert_close(final[s], expected_state, atol=1e-11, rtol=0)
    assert not o[bounds[-1] :].any(), "outputs of padding rows are zero"
    if state is not None and kept is not None:
        assert torch.equal(state, kept), "the given state is not changed"


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 63, 64, 99])
def test_prefill_in_two_pieces_equals_one(cut: int) -> None:
    x = operands(100)
    whole, final = kda.chunked(*x)
    first, carried = kda.chunked(*rows(x, 0, cut))
    second, end = kda.recurrent(*rows(x, cut, 100), carried)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(end, final, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk", [16, 64, 128, 500])
@pytest.mark.parametrize(
    ("name", "gate"),
    [("long memory", (-1e-3, 0.0)), ("bound", (-5.0, -4.99)), ("mixed", (-5.0, 0.0)), ("off", (-1e3, -90))],
)
def test_fp32_stays_accurate_at_extreme_gates(name: str, gate: tuple[float, float], chunk: int) -> None:
    narrow = tuple(part.float() for part in operands(500, key=32, value=32, gate=gate))
    # The rounded inputs are what both see; long memory integrates 500 tokens, hence relative to the largest value.
    expected, expected_state = kda.recurrent(*(part.double() for part in narrow))
    o, final = kda.chunked(*narrow, chunk=chunk)
    assert torch.isfinite(o).all()
    torch.testing.assert_close(o.double(), expected, atol=2e-6 * expected.abs().max().item(), rtol=0)
    torch.testing.assert_close(final.double(), expected_state, atol=4e-6 * expected_state.abs().max().item(), rtol=0)


def test_repeated_key_with_full_writes() -> None:
    """beta = 1, one key, no decay: I + M is all ones below the diagonal, and the state must hold the last value."""
    q, k, v, g, _ = operands(128, key=32)
    k = k[:1].expand(128, -1, -1)
    o, final = kda.chunked(q.float(), k.float(), v.float(), torch.zeros_like(g).float(), torch.ones(128, 2))
    assert torch.isfinite(o).all()
    key = kda.normalize_qk(q, k, torch.float64)[1][-1]
    # |key|^2 = 1 - 1e-6 / |k|^2, so that much of the older values remains.
    torch.testing.assert_close((final[0].double() @ key[..., None])[..., 0], v[-1].double(), atol=1e-4, rtol=0)


def test_bf16_rounds_outputs_only() -> None:
    x = tuple(part.bfloat16() for part in operands(70)[:3])
    g, beta = (part.float() for part in operands(70)[3:])
    o, final = kda.recurrent(*x, g, beta)
    wide, wide_state = kda.recurrent(*(part.float() for part in x), g, beta)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert torch.equal(o, wide.bfloat16())
    assert torch.equal(final, wide_state)


@pytest.mark.parametrize(
    ("a_log", "z", "expected"), [(0, 0, -2.5), (0, 1, -3.6552929), (0.3, -4.5, -0.0114791), (2.4, 0.2, -4.5033249)]
)
def test_gate_values(a_log: float, z: float, expected: float) -> None:
    # The bias takes part: half of z arrives through it.
    half = torch.full((1, 1, 1), z / 2, dtype=torch.float64)
    g = kda.gate(half, torch.tensor([a_log]), half[0], -5.0)
    assert g.item() == pytest.approx(expected, abs=1e-6)


def test_gate_is_per_head() -> None:
    z = torch.randn(3, 2, 4, dtype=torch.float64)
    bias = torch.randn(8, dtype=torch.float64)
    a_log = torch.tensor([0.0, 1.0], dtype=torch.float64)
    g = kda.gate(z, a_log, bias, None)
    expected = -torch.exp(a_log)[:, None] * torch.log1p(torch.exp(z + bias.view(2, 4)))
    torch.testing.assert_close(g, expected, atol=1e-13, rtol=0)
    assert (g < 0).all()
    assert torch.isfinite(kda.gate(z * 1e4, a_log, bias, None)).all()


# --- convolution -----------------------------------------------------------------------------------------------------
def conv_by_hand(history: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """[T, C]: silu of the sum over taps, in fp64."""
    window = torch.cat([history.T, x]).double()
    width = weight.shape[1]
    total = sum(window[j : j + len(x)] * weight[:, j].double() for j in range(width))
    return total * torch.sigmoid(total)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), padding=st.integers(0, 2), width=st.integers(2, 5))
def test_conv_of_packed_sequences(lengths: list[int], padding: int, width: int) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    x = torch.randn(bounds[-1] + padding, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 1, width, generator=generator)
    state = torch.randn(len(lengths), 6, width - 1, generator=generator, dtype=torch.float64)
    y, new = kda.short_conv(x, weight, state, bounds)
    for s in range(len(lengths)):
        part = x[bounds[s] : bounds[s + 1]]
        torch.testing.assert_close(
            y[bounds[s] : bounds[s + 1]], conv_by_hand(state[s], part, weight[:, 0]), atol=1e-12, rtol=0
        )
        assert torch.equal(new[s], torch.cat([state[s], part.T], dim=1)[:, -(width - 1) :])
    assert not y[bounds[-1] :].any()


def test_conv_has_the_same_bits_however_it_is_cut() -> None:
    x = torch.randn(20, 8).bfloat16()
    weight = torch.randn(8, 4)
    whole, final = kda.short_conv(x, weight)
    for cut in (1, 2, 3, 7, 19):
        first, state = kda.short_conv(x[:cut], weight)
        second, end = kda.short_conv(x[cut:], weight, state)
        assert torch.equal(torch.cat([first, second]), whole)
        assert torch.equal(end, final)


# --- speculative verification ----------------------------------------------------------------------------------------
def test_verify_equals_the_accepted_tokens_one_by_one() -> None:
    """Three rounds of verification with varying acceptance against plain decoding of what was accepted."""
    num_spec, width = 2, 4
    drafts = [[3, 1, 2], [1, 3, 3], [2, 3, 1]]  # tokens a sequence and round; the first of each is the sampled one
    accepts = [[1, 1, 2], [1, 2, 3], [2, 1, 1]]
    total = sum(map(sum, drafts))
    x = operands(total, key=8, value=8)
    raw = torch.randn(total, 5, dtype=torch.float64)
    weight = torch.randn(5, width)
    states = torch.full((3, 1 + num_spec, 2, 8, 8), torch.nan, dtype=torch.float64)
    states[:, 0] = state_like(x, 3)
    conv = torch.full((3, 5, width - 1 + num_spec), torch.nan, dtype=torch.float64)
    conv[:, :, : width - 1] = torch.randn(3, 5, width - 1, dtype=torch.float64)
    plain_states, plain_conv = states[:, 0].clone(), conv[:, :, : width - 1].clone()
    accepted = torch.ones(3, dtype=torch.int32)
    row = 0
    for counts, taken in zip(drafts, accepts, strict=True):
        bounds = [0, counts[0], counts[0] + counts[1], sum(counts)]
        part = slice(row, row + sum(counts))
        o, states = kda.verify(*(p[part] for p in x), states, accepted, bounds)
        y, conv = kda.short_conv_verify(raw[part], weight, conv, accepted, bounds)
        for s in range(3):
            mine = slice(row + bounds[s], row + bounds[s] + taken[s])
            expected, end = kda.recurrent(*(p[mine] for p in x), plain_states[s : s + 1])
            torch.testing.assert_close(o[bounds[s] : bounds[s] + taken[s]], expected, atol=1e-12, rtol=0)
            plain_states[s] = end[0]
            expected, end = kda.short_conv(raw[mine], weight, plain_conv[s : s + 1])
            torch.testing.assert_close(y[bounds[s] : bounds[s] + taken[s]], expected, atol=1e-12, rtol=0)
            plain_conv[s] = end[0]
        accepted = torch.tensor(taken)
        row += sum(counts)


def test_verify_keeps_slots_beyond_its_tokens() -> None:
    x = operands(1, key=8, value=8)
    states = state_like(x, 3).unsqueeze(0)
    _, new = kda.verify(*x, states, torch.tensor([3]), [0, 1])
    assert torch.equal(new[0, 1:], states[0, 1:])
    torch.testing.assert_close(new[0, 0], kda.recurrent(*x, states[:, 2])[1][0])


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bounds", [[1, 3], [0, 2, 1], [0, 9], [0], torch.tensor([0, 4, 3])])
def test_bad_boundaries_are_refused(bounds: object) -> None:
    x = operands(4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda.recurrent(*x, None, bounds)


def test_bad_states_are_refused() -> None:
    x = operands(4)
    with pytest.raises(ValueError, match=r"\[S, N, V, K\]"):
        kda.recurrent(*x, state_like(x).transpose(-1, -2))
    with pytest.raises(ValueError, match="conv state"):
        kda.short_conv(torch.zeros(4, 6), torch.zeros(6, 4), torch.zeros(1, 6, 4))
    with pytest.raises(ValueError, match="chunk"):
        kda.chunked(*x, chunk=0)
    with pytest.raises(ValueError, match="speculative"):
        kda.verify(*x, state_like(x, 3).unsqueeze(0), torch.tensor([1]), [0, 4])
    with pytest.raises(ValueError, match="speculative"):
        kda.verify(*rows(x, 0, 1), state_like(x, 3).unsqueeze(0), torch.tensor([0]), [0, 1])
