"""The packed goldens themselves: checkpoints bit for bit, packs intact, a damaged pack refused."""

import hashlib
import json
from pathlib import Path

import golden_data
import numpy as np
import pytest
from safetensors import safe_open

PACKS = sorted(
    str(p.relative_to(golden_data.ROOT).with_suffix("")) for p in golden_data.ROOT.rglob("*.k3g") if p.parent.name
)


@pytest.mark.parametrize("name", PACKS)
def test_every_pack_matches_its_digest(name: str) -> None:
    table, extra = golden_data.decode((golden_data.ROOT / f"{name}.k3g").read_bytes())
    assert golden_data.digest(table) == extra["digest"]
    assert all(array.size or 0 in array.shape for _, array in table.values())


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_bytes"), [("k3-tiny", 934, 11_195_480), ("k3-linear-tiny", 279, None)]
)
def test_checkpoints_are_whole(name: str, num_tensors: int, num_bytes: int | None) -> None:
    directory = golden_data.checkpoint(name)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    seen = 0
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as reader:
            for key in reader.keys():  # noqa: SIM118
                assert index["weight_map"][key] == shard.name
                seen += 1
    assert seen == num_tensors
    if num_bytes is not None:
        assert index["metadata"]["total_size"] == num_bytes


def test_checkpoint_is_written_once(tmp_path: Path) -> None:
    first = golden_data.checkpoint("k3-linear-tiny", tmp_path)
    marker = first / "config.json"
    before = marker.stat().st_mtime_ns
    assert golden_data.checkpoint("k3-linear-tiny", tmp_path) == first
    assert marker.stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["k3-linear-tiny"]


def test_wrong_regeneration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = golden_data.predict_bits
    monkeypatch.setattr(golden_data, "predict_bits", lambda *args: original(*args) ^ np.uint16(args[1] == 0))
    golden_data._read.cache_clear()
    with pytest.raises(ValueError, match="not the recorded"):
        golden_data.write_checkpoint("k3-tiny", tmp_path)
    golden_data._read.cache_clear()


def test_planes_survive_a_round_trip() -> None:
    rng = np.random.default_rng(0)
    table: golden_data.Table = {
        "f32": ("float32", rng.standard_normal((3, 5)).astype(np.float32)),
        "bf16": ("bfloat16", rng.integers(0, 1 << 16, (7,), dtype=np.uint16)),
        "special": ("float32", np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)),
        "empty": ("float64", np.zeros((0, 4))),
        "u8": ("uint8", rng.integers(0, 256, (2, 3), dtype=np.uint8)),
        "scalar": ("float64", np.array(2.5)),
    }
    decoded, extra = golden_data.decode(golden_data.encode(table, {"a": 1}))
    assert extra == {"a": 1}
    assert golden_data.digest(decoded) == golden_data.digest(table)
    digest = hashlib.sha256(decoded["special"][1].tobytes()).hexdigest()
    assert digest == hashlib.sha256(table["special"][1].tobytes()).hexdigest()
