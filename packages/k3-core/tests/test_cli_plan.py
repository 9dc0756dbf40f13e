"""`k3 plan`: its bytes are the loader's and vLLM's, its commands parse, its refusals are one line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from k3_core.checkpoint import (
    CheckpointReader,
    Topology,
    expert_width,
    pad_expert,
    shard_plan,
    tensor_table,
    tiny_config,
    write_tiny,
)
from k3_core.cli.app import app
from k3_core.cli.plan import layouts, serve
from k3_core.cli.plan.cache import cache_shape, latent_bytes, state_bytes
from k3_core.cli.plan.command import RELEASED_CONFIG
from k3_core.cli.plan.devices import DEVICES, GIB, device
from k3_core.cli.plan.experts import expert_form
from k3_core.cli.plan.layouts import Layout, Request
from k3_core.cli.plan.weights import PARTS, WeightModel, part_of
from k3_core.cli.tiny import rank_config
from k3_core.config import K3Config, load_config
from k3_core.errors import ConfigError

DATA = Path(__file__).parent / "data" / "config"
RELEASED = load_config(RELEASED_CONFIG)
WEIGHTS = WeightModel(RELEASED)
FLOOR = 64  # pads the tiny experts: 64 / 2 = 32 is narrower


def invoke(*args: str) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["plan", "--json", *args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def test_the_shipped_configuration_is_the_released_one() -> None:
    assert load_config(DATA / "k3.json") == RELEASED


def loaded(folder: Path, config: K3Config, topology: Topology) -> Counter[str]:
    """Bytes by part that the real reader hands to this rank, experts padded as a loader pads them."""
    _, padded = expert_width(config, topology.tp_size, topology.ep_size, topology.dp_size, FLOOR)
    cut = topology.ep_size == 1 and topology.tp_size * topology.dp_size > 1
    total: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for name, tensor in CheckpointReader(folder, config).tensors(shard_plan(config, topology)):
        part = part_of(name)
        if part == "routed experts" and cut:
            tensor = _pad(*name.split(".")[-2:], tensor, padded)
        total[part] += tensor.nbytes
    return total


def _pad(matrix: str, key: str, tensor: torch.Tensor, padded: int) -> torch.Tensor:
    if key == "weight":
        return pad_expert(matrix, {key: tensor}, padded)[key]
    other = {"weight_packed": "weight_scale", "weight_scale": "weight_packed"}[key]
    pair = {key: tensor, other: torch.zeros(1, 1, dtype=torch.uint8)}
    return pad_expert(matrix, pair, padded)[key]


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {preset: write_tiny(tmp_path_factory.mktemp(preset), preset) for preset in ("k3", "linear")}


@pytest.mark.parametrize("preset", ["k3", "linear"])
@pytest.mark.parametrize(("tp", "ep", "dp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 2), (4, 4, 1)])
def test_weights_are_what_the_loader_reads(
    preset: str, tp: int, ep: int, dp: int, tiny_folders: dict[str, Path]
) -> None:
    config = tiny_config(preset)
    topology = Topology(tp_size=tp, ep_size=ep, dp_size=dp)
    planned = WeightModel(config).rank_bytes(topology, range(config.text.num_hidden_layers), floor=FLOOR)
    real = loaded(tiny_folders[preset], config, topology)
    for part in PARTS:
        assert planned[part] == pytest.approx(real[part], rel=0.03), part
    assert sum(planned.values()) == pytest.approx(sum(real.values()), rel=0.001)


def test_a_wrong_share_of_the_heads_would_be_seen(tiny_folders: dict[str, Path]) -> None:
    config = tiny_config("k3")
    planned = WeightModel(config).rank_bytes(Topology(), range(config.text.num_hidden_layers))
    real = loaded(tiny_folders["k3"], config, Topology(tp_size=2))
    assert planned["attention"] != pytest.approx(real["attention"], rel=0.03)


def test_all_stages_of_the_release_hold_exactly_its_bytes() -> None:
    total = 0
    stages = layouts.stages_of(93, 4)
    for index, stage in enumerate(stages):
        parts = WEIGHTS.rank_bytes(Topology(), stage, first=index == 0, last=index == 3)
        total += sum(parts.values())
    tails = 69 * (128 - 96) * 4  # A_log's zero tails are not kept
    assert total == sum(spec.nbytes for spec in tensor_table(RELEASED).values()) - tails == 1_560_860_324_864 - tails


@pytest.mark.parametrize("tp", [8, 16])
def test_a_rank_emulated_configuration_has_the_bytes_of_the_rank(tp: int) -> None:
    emulated = WeightModel(rank_config(f"tp{tp}", 4)).rank_bytes(Topology(), range(4), floor=1)
    rank = WEIGHTS.rank_bytes(Topology(tp_size=tp), range(4), floor=1)
    for part in PARTS:
        assert emulated[part] == pytest.approx(rank[part], rel=0.03), part


def test_stages_are_cut_as_vllm_cuts_them() -> None:
    assert layouts.stages_of(93, 2) == [range(0, 47), range(47, 93)]
    assert [len(s) for s in layouts.stages_of(93, 4)] == [23, 23, 24, 23]
    utils = pytest.importorskip("vllm.distributed.utils")
    for pp in (1, 2, 3, 4, 7, 8, 16):
        wanted = [utils.get_pp_indices(93, rank, pp) for rank in range(pp)]
        assert [(s.start, s.stop) for s in layouts.stages_of(93, pp)] == wanted


def test_states_and_rows_of_the_release() -> None:
    # TP 1: 434,110,464 bytes of recurrence and 15,261,696 of convolution in 69 layers; 27,648 a token in 24 layers
    assert 69 * state_bytes(RELEASED, 1) == 434_110_464 + 15_261_696
    assert 24 * latent_bytes(RELEASED) == 27_648
    assert state_bytes(RELEASED, 8, "bfloat16") < state_bytes(RELEASED, 8)


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (16, 1), (8, 2), (4, 4)])
def test_cache_groups_and_pages_are_vllms(tp: int, pp: int) -> None:
    kv = pytest.importorskip("vllm.v1.kv_cache_interface")
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    text = RELEASED.text
    stages = layouts.stages_of(93, pp)
    shape = cache_shape(RELEASED, tp, stages[0], kv_dtype="auto", state_dtype="float32", prefix_caching=True)
    heads = 96 // tp
    mla = kv.MLAAttentionSpec(block_size=shape.block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    mla_page = getattr(mla, "real_page_size_bytes", mla.page_size_bytes)
    kda = kv.MambaSpec(
        block_size=shape.block_size, shapes=((3 * heads * 128, 3), (heads, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32), page_size_padded=shape.page_bytes,
    )  # fmt: skip
    assert kda.page_size_bytes == shape.page_bytes
    assert mla_page in (shape.page_bytes, 2 * shape.page_bytes)  # a specification without `customize_spec` counts V too
    specs = {f"layers.{i}": kda if text.layer_kind(i) == "kda" else mla for i in range(93)}
    groups = utils._get_kv_cache_groups_uniform_page_size(specs)
    assert len(groups) == shape.kda_groups + shape.mla_groups
    for stage in stages:
        ours = cache_shape(RELEASED, tp, stage, kv_dtype="auto", state_dtype="float32", prefix_caching=True)
        held = [sum(int(name.split(".")[1]) in stage for name in group.layer_names) for group in groups]
        assert ours.pages_per_block == max(held)


def test_two_h200_nodes_want_tensor_parallelism_inside_a_node() -> None:
    code, report = invoke("--gpu", "h200", "--nodes", "2")
    assert code == 0
    best = report["topologies"][0]
    assert best["name"] == "TP8 x PP2"
    assert best["fits"]
    assert len(best["commands"]) == 2
    by_name = {t["name"]: t for t in report["topologies"]}
    wide = by_name["TP16"]  # k3-nvidia keeps experts of 192 columns as they are
    assert wide["fits"]
    assert not any("padded" in reason for reason in wide["reasons"])
    assert any("crosses nodes" in reason for reason in wide["reasons"])
    assert sum(best["bytes"].values()) <= best["budget"]
    ranked = [t["fits"] for t in report["topologies"]]
    assert ranked == sorted(ranked, reverse=True)


def test_vllms_own_model_pads_narrow_experts() -> None:
    """192 columns become 256, and TP16 does not fit with a cache; on a vendor whose wheel says nothing, too."""
    _, report = invoke("--gpu", "h200", "--nodes", "2", "--tp", "16", "--no-ep", "--expert-floor", "256")
    (padded,) = report["topologies"]
    assert not padded["fits"]
    assert any("padded to 256" in reason for reason in padded["reasons"])
    _, stated = invoke("--gpu", "x", "--memory-gib", "139", "--nodes", "2", "--tp", "16", "--no-ep")
    assert stated["topologies"][0]["bytes"] == padded["bytes"]


def test_data_parallel_experts_are_padded_as_vllm_does() -> None:
    _, report = invoke("--gpu", "b300", "--nodes", "2", "--tp", "8", "--dp", "2", "--no-ep")
    assert any("padded to 256" in reason for reason in report["topologies"][0]["reasons"])


def test_one_h200_node_is_too_small_and_says_by_how_much() -> None:
    code, report = invoke("--gpu", "h200")
    assert code == 1
    assert not any(t["fits"] for t in report["topologies"])
    assert "GiB more" in report["topologies"][0]["reasons"][0]


@pytest.mark.parametrize(
    ("gpu", "nodes"), [("mi355x", 1), ("mi325x", 1), ("b300", 1), ("ascend-a3", 2), ("ascend-a2", 6)]
)
def test_every_vendor_gets_a_plan(gpu: str, nodes: int) -> None:
    code, report = invoke("--gpu", gpu, "--nodes", str(nodes), "--max-len", "32768", "--seqs", "8")
    assert code == (0 if any(t["fits"] for t in report["topologies"]) else 1)
    assert report["device"]["proof"] in ("nominal", "measured")
    assert report["topologies"]


def test_more_tokens_fit_with_a_smaller_cache() -> None:
    sizes = []
    for options in (
        (),
        ("--kv-dtype", "fp8"),
        ("--kv-dtype", "fp8", "--state-dtype", "bfloat16", "--no-prefix-caching"),
    ):
        _, report = invoke("--gpu", "h200", "--nodes", "2", "--tp", "8", "--pp", "2", "--no-ep", *options)
        sizes.append(report["topologies"][0]["tokens"])
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] * 0.6


def test_data_parallelism_is_planned_only_when_asked_for() -> None:
    _, report = invoke("--gpu", "b200", "--nodes", "2")
    assert {t["dp"] for t in report["topologies"]} == {1}
    _, report = invoke("--gpu", "b200", "--nodes", "2", "--dp", "2")
    assert {t["dp"] for t in report["topologies"]} == {2}
    assert all(any("K3_IMPL=upstream" in r for r in t["reasons"]) for t in report["topologies"])


def test_room_ranks_by_tokens() -> None:
    _, report = invoke("--gpu", "h200", "--nodes", "2", "--prefer", "room")
    tokens = [t["tokens"] for t in report["topologies"] if t["fits"]]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpu", "h300"), ("h300", "h200", "--memory-gib")),
        (("--gpu", "h200", "--tp", "5"), ("--tp 5", "8 accelerators")),
        (("--gpu", "h200", "--max-len", "2000000"), ("1048576",)),
        (("--gpu", "h200", "--kv-dtype", "int4"), ("--kv-dtype",)),
        (("--gpu", "h200", "--prefer", "luck"), ("latency or room",)),
        (("--gpu", "h200", "--checkpoint", "nowhere"), ("nowhere",)),
    ],
)
def test_refusals_name_the_option(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["plan", *args])
    assert isinstance(done.exception, ConfigError)
    for word in words:
        assert word in str(done.exception)


def test_a_size_that_does_not_divide_is_listed_as_refused() -> None:
    _, report = invoke("--gpu", "x", "--memory-gib", "400", "--gpus-per-node", "5", "--max-len", "4096")
    assert {r["name"] for r in report["refused"]} >= {"TP5"}
    assert any("num_attention_heads = 96" in r["reason"] for r in report["refused"])


def test_text_output_has_the_commands_on_one_line_each() -> None:
    done = CliRunner().invoke(app, ["plan", "--gpu", "mi355x"])
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("vllm serve")]
    assert line.endswith("--enable-auto-tool-choice")
    assert "estimate" in done.stdout


def commands() -> list[str]:
    request = Request(kv_dtype="fp8", state_dtype="bfloat16", prefix_caching=False, graphs=False)
    cases = [Layout(8, 2), Layout(8, 1, 2, True), Layout(16, 1, 1, True)]
    target = DEVICES["h200"]
    lines = [line for layout in cases for line in serve.commands("m", RELEASED, layout, target, request)]
    return lines + serve.commands("m", tiny_config("linear"), Layout(1), target, Request())


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@pytest.mark.slow
def test_vllm_knows_every_flag() -> None:
    """Every command line parses with vLLM's own parser; an unknown flag or value would exit."""
    pytest.importorskip("vllm")
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    found = next((place for place in places if _exists(place)), None)
    assert found, "vLLM moved the parser of `vllm serve`"
    make_arg_parser = importlib.import_module(found).make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for line in commands():
        arguments = parser.parse_args(shlex.split(line)[3:])
        assert arguments.tensor_parallel_size in (1, 8, 16)
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-such-flag-of-vllm"])


def test_device_table_is_complete() -> None:
    for one in DEVICES.values():
        assert one.memory > 60 * GIB
        assert one.proof in ("measured", "nominal")
    assert device("h200", memory_gib=100).memory == 100 * GIB
    with pytest.raises(ConfigError, match="--memory-gib -1"):
        device("h200", memory_gib=-1)


@pytest.mark.parametrize(("ranks", "form"), [(1, "w4a8"), (4, "w4a8"), (8, "int8"), (16, "int8")])
def test_ascend_experts_are_counted_in_the_form_they_are_served_in(ranks: int, form: str) -> None:
    found = expert_form(RELEASED, DEVICES["ascend-a3"], ranks, upstream=False, floor=None)
    assert (found.name, found.padded) == (form, 3072 // ranks)
    released = expert_form(RELEASED, DEVICES["h200"], ranks, upstream=False, floor=None)
    assert found.nbytes / released.nbytes == pytest.approx(1 if form == "w4a8" else 32 / 17, rel=0.03)


def test_requantisation_is_said() -> None:
    _, report = invoke("--gpu", "ascend-a3", "--nodes", "2", "--max-len", "32768", "--seqs", "8")
    assert all(any("requantised" in reason for reason in t["reasons"]) for t in report["topologies"])
    assert report["topologies"][0]["ep"], "whole experts stay in four bits"
