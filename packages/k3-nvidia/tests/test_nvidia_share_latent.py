"""``bench_engine.py --share-latent``: long batches compute rank 0's share of the latent's projections."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from nvidia_support import Group, build, groups, our_model, settle
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from k3_core.checkpoint import CheckpointReader
from k3_core.vllm.serving import reductions

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RANKS, LONG = 4, 6


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def worker_of(model: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(model=model))


def operations(call: Any) -> tuple[Tensor, int]:
    """(result, floating point operations of the products) of a call."""

    def in_place(_: Any, a: Any, b: Any, **named: Any) -> int:  # the counter knows the other one only
        return 2 * a[0] * a[1] * b[1]

    mapping = {torch.ops.aten.addmm_: in_place}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        result = call()
    return result, counter.get_total_flops()


class Product(torch.nn.Module):
    """A linear layer whose weight stays [out, in]: a CPU build of vLLM repacks its own."""

    def __init__(self, like: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(like.shape, generator=generator) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


@pytest.fixture
def layer(nvidia_tiny: Path) -> Any:
    """A layer of experts of one rank with random weights; its routed experts are a fixed function of x and latent."""
    with groups(Group(), Group()), our_model():
        model = build(settle(nvidia_tiny, dtype="float32"), CheckpointReader(nvidia_tiny).config)
    found = next(m for _, m in model.model.own_layers() if m.is_moe).feed_forward
    assert found.form == "none"
    generator = torch.Generator().manual_seed(7)
    found.in_proj = Product(found.in_proj.weight, generator)
    found.routed_expert_up_proj = found._finish.up = Product(found.routed_expert_up_proj.weight, generator)
    found.shared_experts.down_proj = Product(found.shared_experts.down_proj.weight, generator)
    found._finish.norm = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    found.routed = lambda x, latent: latent * x[:, :1]
    return found


@pytest.fixture
def _short_is_below_six(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "SHARD_TOKENS", LONG)
    monkeypatch.setattr(reductions, "GATHER_TOKENS", LONG)
    monkeypatch.setattr(reductions, "merged", None)  # what short batches of the form would take: copies, same values
    for name in ("tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce"):
        monkeypatch.setattr(reductions, name, getattr(reductions, name))  # put back afterwards


@pytest.mark.usefixtures("_short_is_below_six")
def test_our_layer_computes_what_the_adaptive_form_leaves_to_rank_0(layer: Any) -> None:
    import engine_worker

    hidden, latent = layer.text.hidden_size, layer.text.routed_expert_hidden_size
    x = torch.randn(LONG, hidden, generator=torch.Generator().manual_seed(1))
    whole, all_of_it = operations(lambda: layer(x))
    short, _ = operations(lambda: layer(x[:-1]))
    assert engine_worker.share_latent(worker_of(torch.nn.ModuleList([layer])), RANKS) == 1
    found, share = operations(lambda: layer(x))

    down, up = layer.input_weight("routed_expert_down_proj"), layer.routed_expert_up_proj.weight
    gate_up = linear(x, layer.input_weight("shared_experts.gate_proj", "shared_experts.up_proj"))
    mine = x @ down[: latent // RANKS].t()
    routed = layer.routed(x, torch.cat([mine] * RANKS, dim=-1))
    with torch.no_grad():
        want = layer.shared_experts.finish(gate_up)
        want[:, : hidden // RANKS] += layer._finish.norm(routed) @ up[: hidden // RANKS].t()
    torch.testing.assert_close(found, want)
    assert not torch.allclose(found, whole, atol=1e-3), "a part only"

    padding = layer.rows.padded - layer.rows.total
    saved = 2 * LONG * hidden * (2 * (latent - latent // RANKS) + padding)
    assert all_of_it - share == saved > 0
    with torch.no_grad():
        assert torch.equal(layer(x[:-1]), short), "shorter batches stay as they are"


@pytest.mark.usefixtures("_short_is_below_six")
def test_the_gathered_latent_is_written(layer: Any) -> None:
    """As many bytes as every rank holds after the collective: not a view of this rank's columns."""
    import engine_worker

    engine_worker.share_latent(worker_of(torch.nn.ModuleList([layer])), RANKS)
    x, weight = torch.randn(5, 8), torch.randn(12, 8)
    latent = reductions.gathered(x, weight, 0, RANKS)
    assert latent.is_contiguous()
    assert latent.untyped_storage().nbytes() == 5 * 12 * 4
    torch.testing.assert_close(latent, linear(x, weight[:3]).repeat(1, RANKS))


def test_a_model_without_a_latent_is_refused() -> None:
    import engine_worker

    with pytest.raises(RuntimeError, match="no experts in a latent space"):
        engine_worker.share_latent(worker_of(torch.nn.Linear(2, 2)), RANKS)


def test_vllms_layer_computes_its_share_of_the_up_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own runner around stand-ins: what it does with four ranks is what the emulation does with one."""
    module = pytest.importorskip("vllm.models.kimi_k3.nvidia.latent_moe_runner")
    import engine_worker

    monkeypatch.setenv("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", str(LONG - 1))
    generator = torch.Generator().manual_seed(2)
    hidden, latent = 16, 8
    x, routed, shared = (torch.randn(LONG, n, generator=generator) for n in (hidden, latent, hidden))
    up, norm = torch.nn.Linear(latent, hidden, bias=False), torch.nn.RMSNorm(latent)

    def runner(ranks: int) -> Any:
        made = module.LatentMoERunner.__new__(module.LatentMoERunner)
        torch.nn.Module.__init__(made)
        made.routed_output_transform = torch.nn.Sequential(OrderedDict(norm=norm, up_proj=up))
        made.moe_config = SimpleNamespace(
            tp_size=ranks, ep_size=1, is_sequence_parallel=False, skip_final_all_reduce=False,
            hidden_dim_unpadded=latent, should_defer_moe_finalize=lambda tokens: False,
        )  # fmt: skip
        kernel = SimpleNamespace(moe_kernel=None, has_unpadded_output=False)
        made.routed_experts = SimpleNamespace(quant_method=kernel)
        made.router, made._shared_experts = None, object()
        made.enable_k3_latent_moe_tail_fusion, made.routed_scaling_factor = False, 1.0
        made._maybe_pad_hidden_states = lambda given, states: (states, None, None)
        made._encode_layer_name = str
        made._forward_entry = lambda states, *_: (shared[: len(states)].clone(), routed[: len(states)])
        return made

    def result(made: Any, tokens: int) -> tuple[Tensor, int]:
        return operations(lambda: made(x[:tokens, :latent], x[:tokens], shared_experts_input=x[:tokens]))

    four = runner(RANKS)
    four.allreduce_norm_latent_out = lambda states, norm: norm(states)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    with groups(Group(), Group()):  # a sum over ranks that are not there is the partial sum
        want, share = result(four, LONG)
    emulated = runner(1)
    short, _ = result(emulated, LONG - 1)
    _, all_of_it = result(emulated, LONG)
    assert engine_worker.share_latent(worker_of(torch.nn.ModuleList([emulated])), RANKS) == 1
    found, operated = result(emulated, LONG)
    torch.testing.assert_close(found, want)
    assert operated == share == all_of_it // RANKS == 2 * LONG * latent * hidden // RANKS
    assert torch.equal(result(emulated, LONG - 1)[0], short), "shorter batches stay as they are"


def test_its_lines_are_prompts_that_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bench_engine
    import engine_worker

    calls: list[Any] = []

    class Engine:
        def collective_rpc(self, what: Any, args: tuple[Any, ...] = ()) -> list[Any]:
            calls.append((what.__name__, *args))
            return [{} if what is engine_worker.facts else []]

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(bench_engine, "start", lambda folder, **settings: Engine())
    monkeypatch.setattr(bench_engine, "say", lambda **row: said.append(row))
    monkeypatch.setattr(bench_engine, "prefill_ms", lambda *args: {"ms": 1.0})
    options = SimpleNamespace(
        shape="tp8", impl="ours", share_latent=True, only_start=False, rounds=1, traces=None,
        turns=SimpleNamespace(rounds=range),
    )  # fmt: skip
    bench_engine.rank(tmp_path, options, "k3-nvidia")
    assert ("share_latent", 8) in calls
    assert {row["latent"] for row in said if row["part"] == "rank"} == {"shared over 8 ranks, collectives left out"}
    assert [row["prefill"] for row in said if "ms" in row] == [1024, 8192, 32768]


@pytest.mark.parametrize("more", [["--shape", "tiny"], ["--startup"]])
def test_what_cannot_share_a_latent_is_refused(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_engine

    monkeypatch.setattr(sys, "argv", ["bench_engine.py", "--share-latent", *more])
    with pytest.raises(SystemExit) as stopped:
        bench_engine.main()
    assert stopped.value.code == 2
    assert "--share-latent takes its ranks from --shape" in capsys.readouterr().err


def test_its_lines_are_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bench_engine
    import engine_rows
    import engine_timeline

    latent = bench_engine.SHARED_LATENT.format(16)

    def lines(ours: float, **more: Any) -> list[dict[str, Any]]:
        sides = (("ours", "k3-nvidia", ours), ("upstream", "marlin", 9.0), ("upstream", "auto", 2 * ours))
        step = {"rows": [["w13", engine_timeline.PARTS[0], 1, 1e3 * ours, 1e3 * ours]], "gaps": 0.0}
        found = []
        for impl, experts, ms in sides:
            who = {"shape": "tp16", "impl": impl, "experts": experts, **more}
            found.append({"part": "rank", **who, "prefill": 32768, "ms": ms})
            found.append(engine_timeline.line(who, {"prefill 8192": step}))
        return found

    def written(found: list[dict[str, Any]]) -> dict[str, Any]:
        (tmp_path / "engine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
        return json.loads(engine_rows.write(tmp_path).read_text())

    plain, both = written(lines(4.0)), written(lines(4.0) + lines(3.0, latent=latent))
    assert both["rows"] == plain["rows"]
    title = f"tp16: prefill with the latent {latent}, milliseconds"
    row = {"case": "prefill 32768", "ours": 3.0, "marlin": 9.0, "humming": 6.0, "ratio": 0.5}
    assert both["tables"].pop(title) == [row]
    (of_time,) = plain["tables"]
    shared_time = both["tables"].pop(f"{of_time}, latent {latent}")
    assert both["tables"] == plain["tables"]
    assert shared_time[0]["prefill 8192 ours"] == 3000
    assert plain["tables"][of_time][0]["prefill 8192 ours"] == 4000
    assert len(both["notes"]) == len(plain["notes"]) + 1

    refused = {"part": "rank", "shape": "tp16", "impl": "ours", "experts": "k3-nvidia", "prefill": 1024,
               "latent": latent, "device_refused": "no trace"}  # fmt: skip
    assert engine_rows.refusals([refused]) == [
        f"No device time of ours in tp16 prefill 1024, latent {latent}: no trace."
    ]
    ran: list[Any] = []
    monkeypatch.setattr(
        engine_rows.subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=0)
    )
    written(lines(3.0, latent=latent))
    engine_rows.run(tmp_path, ["tp16"])
    assert len(ran) == 3, "such lines alone do not stand for the rows of the same process"
