"""The warm-up's token counts reach every variant that any count of a step can need: tried for each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

from k3_core.testing.variants import variant
from k3_core.vllm.serving.warmup import Limits, representatives
from k3_nvidia import warmup
from k3_nvidia.kernels import attn_res, attn_res_cluster, experts, glue, moe_layout, router, situ
from k3_nvidia.tuning import attn_res as attn_res_tuning
from k3_nvidia.tuning import experts as experts_tuning
from k3_nvidia.tuning import moe_step

pytestmark = pytest.mark.usefixtures("without_interpreter")

HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
LONGEST = 8192
CONFIG: Any = SimpleNamespace(
    text=SimpleNamespace(num_experts=EXPERTS, num_experts_per_token=TOP_K, linear_attn=SimpleNamespace(num_heads=96))
)
H200_MULTIPROCESSORS = 132


def rows(tokens: int, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(tokens, *size, dtype=dtype, device="meta")


class Step:
    """The kernels that run on all tokens of a step, in the shapes of a rank; nothing is computed."""

    def __init__(self, heads: int, width: int) -> None:
        self.heads, self.width = heads, width
        self.vector = rows(HIDDEN)
        self.weights = moe_layout.empty_swizzled(EXPERTS, width, LATENT, "meta")
        self.gate = rows(EXPERTS, HIDDEN)
        self.bias = rows(EXPERTS, dtype=torch.float32)
        self.expert_map = rows(EXPERTS, dtype=torch.int32)

    def mixes(self, tokens: int) -> None:
        x, bank = rows(tokens, HIDDEN), rows(tokens, 8, HIDDEN)
        for blocks in (0, 1, 2, 3, 5, 8):
            attn_res.attn_res(x, x, bank, self.vector, self.vector, 1e-6, blocks)

    def glue(self, tokens: int) -> None:
        heads, weight = self.heads, self.vector
        projected = rows(tokens, 2176)
        if tokens <= glue.MAX_ROWS:
            glue.kda_inputs(projected[:, :128], projected[:, 128 : 128 + heads], rows(heads * 128, 128))
        glue.sigmoid_fp32(projected[:, :heads])
        glue.rms_norm(projected[:, :512], weight[:512], 1e-6)
        glue.low_rank_norms(
            projected[:, :1536], projected[:, 1536:2048], weight[:1536], weight[:512], 1e-6, heads * 128
        )
        glue.sigmoid_mul(rows(tokens, heads * 128), rows(tokens, heads * 128))
        situ.situ_and_mul(rows(tokens, 2 * self.width), 4.0, 25.0)

    def experts(self, tokens: int) -> None:
        hidden, latent = rows(tokens, HIDDEN), rows(tokens, LATENT)
        act: dict[str, Any] = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
        experts.moe_forward(hidden, latent, self.gate, self.bias, self.weights, TOP_K, **act)

    def scheduled(self, tokens: int) -> None:
        """A layer of experts as ``K3_MOE_STEP`` lays it over streams."""
        how = moe_step.choose(moe_step.schedules("any", self.width), tokens)
        act: dict[str, Any] = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
        hidden = rows(tokens, HIDDEN)
        chosen = experts.choose_experts(hidden, self.gate, self.bias, self.weights, TOP_K, first=how.choice)
        experts.apply_experts(rows(tokens, LATENT), self.weights, chosen, first=how.choice, **act)
        with glue.serial() if how.shared and not how.split else contextlib.nullcontext():
            situ.situ_and_mul(rows(tokens, 2 * self.width), 4.0, 25.0)
        with glue.serial() if how.shared else contextlib.nullcontext():
            glue.rms_norm(rows(tokens, LATENT), self.vector[:LATENT], 1e-6)

    def apart(self, tokens: int) -> None:
        """Router and experts as two operators, with expert parallelism."""
        act: dict[str, Any] = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
        router.route(
            rows(tokens, EXPERTS, dtype=torch.float32), self.bias, TOP_K, renormalize=True, routed_scaling_factor=1.0,
            num_expert_group=1, topk_group=1,
        )  # fmt: skip
        ids, weights = rows(tokens, TOP_K, dtype=torch.int32), rows(tokens, TOP_K, dtype=torch.float32)
        experts.experts(rows(tokens, LATENT), self.weights, weights, ids, expert_map=self.expert_map, **act)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Variants that would be launched on an H200."""
    from triton.runtime.jit import KernelInterface

    found: set[Any] = set()

    def note(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: found.add(variant(kernel, args, named))

    def cluster(*args: Any) -> None:
        num_blocks, clusters, resident = args[7], args[9], args[10]
        found.add(("cluster", next(r for r in attn_res_cluster.ROWS if num_blocks < r), clusters, resident))

    monkeypatch.setattr(KernelInterface, "__getitem__", note)
    monkeypatch.setattr(attn_res, "_clusters", lambda num_blocks, *tensors: num_blocks > 0)
    monkeypatch.setattr(attn_res_cluster, "launch", cluster)
    monkeypatch.setattr(attn_res_tuning, "multiprocessors", lambda device: H200_MULTIPROCESSORS)
    monkeypatch.setattr(experts, "_device", lambda: (experts_tuning.HOPPER, 90))

    def plan(tokens: int, top_k: int, num_experts: int, weights: Any) -> Any:
        return experts_tuning.choose(tokens, top_k, num_experts, experts_tuning.HOPPER, 90, weights.padded_width)

    monkeypatch.setattr(experts, "_plan", plan)
    return found


def reached(met: set[Any], part: Callable[[int], None], counts: Any) -> set[Any]:
    met.clear()
    for count in counts:
        part(count)
    return set(met)


@pytest.mark.parametrize("part", ["mixes", "glue", "experts", "apart", "scheduled"])
def test_every_count_of_a_step_is_met(part: str, met: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "scheduled":
        monkeypatch.setenv(moe_step.VARIABLE, "9:choice+shared,50:choice,70:split+shared,3000:shared")
        monkeypatch.setattr(glue, "_capability", lambda device: 9)
    run = getattr(Step(6, 192), part)
    counts = warmup.WARM_UP.token_counts(CONFIG, Limits(LONGEST, 128, 0))
    assert len(counts) < 20, counts
    short = reached(met, run, counts)
    assert reached(met, run, range(1, LONGEST + 1)) == short
    # Mutant: a warm-up that knows no table.
    assert reached(met, run, representatives({}, LONGEST)) < short


@pytest.mark.parametrize("module", [experts, router, situ], ids=lambda module: module.__name__.rpartition(".")[2])
def test_tables_that_schedules_touch_have_their_edges(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of such a table is cut where another schedule begins, whatever the other tables happen to cut there."""
    monkeypatch.setenv(moe_step.VARIABLE, "9:choice,70:shared")
    found = {profile["tokens"] for profile in module.warmup_profiles(CONFIG, Limits(LONGEST, 128, 0))}
    assert {9, 70} <= found
