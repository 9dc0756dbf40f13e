"""The low-rank norms' eps is 1e-6, not the config's 1e-5: invisible in the logits of well-scaled models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3_core.config import load_config
from k3_core.contracts import mla
from k3_core.reference import load_model
from k3_core.reference.cache import MlaState
from k3_core.reference.layers import mla_attention


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
def test_the_model_passes_the_low_rank_eps_to_its_latent_attention(k3_tiny: Path, width: torch.dtype) -> None:
    """With latents of mean square about 1e-5 the two values differ by far more than rounding."""
    text = load_config(k3_tiny).text
    model = load_model(k3_tiny, width)
    index = next(i for i in range(text.num_hidden_layers) if text.layer_kind(i) == "mla")
    weights = model.weights.layers[index].attention
    assert isinstance(weights, mla.MlaWeights)
    assert weights.q_a is not None
    torch.manual_seed(0)
    x = torch.randn(9, text.hidden_size).to(width)
    scale = 3e-3 / (x @ weights.kv_a.T).float().square().mean().sqrt().item()
    small = replace(weights, q_a=weights.q_a * scale, kv_a=weights.kv_a * scale)
    state = MlaState(x.new_zeros(0, text.kv_lora_rank + text.qk_rope_head_dim))

    def expected(eps: float) -> torch.Tensor:
        heads, nope = text.num_attention_heads, text.qk_nope_head_dim
        return mla.layer(x, small, num_heads=heads, nope_dim=nope, past=state.rows, low_rank_eps=eps)[0]

    out, _ = mla_attention(x, small, text, state)
    assert torch.equal(out, expected(1e-6))
    assert (expected(1e-5) - expected(1e-6)).abs().max() > 0.05 * expected(1e-6).abs().max()
