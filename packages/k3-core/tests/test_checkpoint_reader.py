"""Streaming: everything once, in file order, one shard at a time, each rank its part, little memory."""

import gc
import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import k3_core.checkpoint.reader as reader_module
from k3_core.checkpoint import CheckpointReader, Topology, shard_plan, tiny_config, write_tiny

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_reader.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "k3")


@pytest.fixture(scope="module")
def stored(folder):
    return load_all(folder)


def load_all(folder):
    """Copies of all tensors, so that nothing of the test stays mapped."""
    return {n: t.clone() for shard in sorted(folder.glob("*.safetensors")) for n, t in load_file(shard).items()}


def test_everything_once_and_bit_equal(folder, stored):
    reader = CheckpointReader(folder)
    seen = []
    for name, tensor in reader:
        seen.append(name)
        expected = stored[name][:4] if name.endswith("A_log") else stored[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
        assert tensor.is_contiguous()
    assert sorted(seen) == sorted(stored)
    assert seen == [name for names in reader.manifest.by_shard().values() for name in names]


def test_f32_stays_f32(folder):
    found = {name for name, tensor in CheckpointReader(folder) if tensor.dtype == torch.float32}
    assert found
    assert all(
        name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias"))
        for name in found
    )


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_all_ranks_make_the_whole(tmp_path, size):
    config = tiny_config("k3", num_hidden_layers=4, num_experts=2, moe_intermediate_size=128)
    folder = write_tiny(tmp_path, config)
    stored = load_all(folder)
    reader = CheckpointReader(folder)
    plans = [shard_plan(reader.config, Topology(size, rank)) for rank in range(size)]
    parts = [dict(reader.tensors(plan, copy=True)) for plan in plans]
    for name, tensor in stored.items():
        whole = tensor[:4] if name.endswith("A_log") else tensor
        plan = plans[0][name]
        found = [part[name] for part in parts]
        assert all(t.is_contiguous() for t in found)
        if plan.is_whole:
            assert all(torch.equal(t, whole) for t in found), name
        elif name.endswith("wqkv.weight"):
            thirds = [t.chunk(3) for t in found]
            assert torch.equal(torch.cat([t[i] for i in range(3) for t in thirds]), whole)
        else:
            assert torch.equal(torch.cat(found, plan.dim), whole), name


def test_experts_of_other_ranks_are_not_read(folder):
    reader = CheckpointReader(folder)
    plan = shard_plan(reader.config, Topology(ep_size=4, ep_rank=2))
    experts = {name.split(".experts.")[1].split(".")[0] for name, _ in reader.tensors(plan) if ".experts." in name}
    assert experts == {"4", "5"}


def test_shards_without_wanted_tensors_are_not_opened(folder, monkeypatch):
    opened = []
    real = reader_module.safe_open

    def spy(path, framework):
        opened.append(Path(path).name)
        return real(path, framework)

    monkeypatch.setattr(reader_module, "safe_open", spy)
    reader = CheckpointReader(folder)
    names = [name for name, _ in reader.tensors(wanted=lambda name: name.startswith("vision_tower."))]
    assert names
    assert opened == ["model-00008-of-000008.safetensors"]


def open_files(folder):
    maps = Path("/proc/self/maps").read_text()
    return {line.split("/")[-1] for line in maps.splitlines() if str(folder) in line}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_shard_is_mapped_at_a_time(folder):
    gc.collect()
    assert open_files(folder) == set()
    reader = CheckpointReader(folder)
    for name, tensor in reader.tensors():
        assert open_files(folder) <= {reader.manifest[name].shard}
        del tensor
    del name
    gc.collect()
    assert open_files(folder) == set()


def test_a_shard_is_mapped_again_after_a_while(folder, stored, monkeypatch):
    monkeypatch.setattr(reader_module, "REMAP_BYTES", 100_000)
    opened = []
    real = reader_module.safe_open
    monkeypatch.setattr(
        reader_module, "safe_open", lambda path, framework: opened.append(path) or real(path, framework)
    )
    found = dict(CheckpointReader(folder).tensors(copy=True))
    assert len(opened) > 40
    assert all(torch.equal(found[name], stored[name]) for name in stored if not name.endswith("A_log"))


def test_copies_are_independent(folder, stored):
    name = "language_model.lm_head.weight"
    reader = CheckpointReader(folder)
    copied = reader.read(name)
    copied.zero_()
    assert torch.equal(reader.read(name), stored[name])
    part = shard_plan(reader.config, Topology(2, 1))[name]
    assert torch.equal(reader.read(name, part), stored[name][384:])
    with pytest.raises(KeyError):
        reader.read("nonsense")


def test_stopping_early_leaves_nothing_open(folder):
    stream = CheckpointReader(folder).tensors()
    next(stream)
    stream.close()
    gc.collect()
    if sys.platform.startswith("linux"):
        assert open_files(folder) == set()


def test_progress_goes_to_stderr(folder, capsys):
    list(CheckpointReader(folder).tensors(progress=True))
    out, err = capsys.readouterr()
    assert out == ""
    assert "checkpoint" in err


def load_benchmark():
    spec = importlib.util.spec_from_file_location("bench_reader", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_memory_benchmark_measures(tmp_path):
    """On a small checkpoint, in this process; the 4 GiB run belongs to the benchmark page."""
    bench = load_benchmark()
    total = bench.write_synthetic(tmp_path, bench.synthetic_config(0.06))
    assert total > 0.05 * 2**30
    whole, tp8 = bench.measure(tmp_path, "whole"), bench.measure(tmp_path, "tp8")
    assert whole["tensor_bytes"] == total
    assert tp8["tensor_bytes"] < 0.3 * total
    largest_shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for stream in (whole, tp8):
        assert stream["peak_extra_anonymous_bytes"] < 2**25
        assert stream["peak_extra_rss_bytes"] < 2 * largest_shard + 2**25 < total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_memory_benchmark_would_see_a_leak():
    """The measuring itself: anonymous memory of a known size is seen as such."""
    with load_benchmark().PeakMemory() as memory:
        kept = torch.ones(2**24)
        time.sleep(0.02)
    assert kept.numel() * 4 * 0.9 < memory.extra("RssAnon") < 2**27
    assert memory.extra("VmHWM", "VmRSS") > kept.numel() * 4 * 0.9
