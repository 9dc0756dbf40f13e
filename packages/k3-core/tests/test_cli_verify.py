"""`k3 verify --full`: names the first bad byte's tensor, resumes, compares checksums, reads every byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3_core.checkpoint import Manifest, verify_headers, write_tiny
from k3_core.cli import scan
from k3_core.cli.app import app


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "k3", seed=4)


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def verify(folder: Path, *args: str) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["verify", str(folder), "--json", "--full", *args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def damage(folder: Path, ending: str, offset: int, data: bytes) -> tuple[Path, str, int]:
    """Overwrite bytes of the first tensor whose name ends so, keeping the file's time; file, tensor, file offset."""
    manifest: Manifest = verify_headers(folder)
    name = next(name for name in manifest if name.endswith(ending))
    stored = manifest[name]
    path = folder / stored.shard
    with path.open("r+b") as file:
        file.seek(stored.begin + offset)
        file.write(data)
    return path, stored.stored_name, stored.begin + offset


def test_a_good_checkpoint_is_read_completely(folder: Path) -> None:
    code, report = verify(folder)
    assert code == 0
    assert report["ok"]
    shards = list(folder.glob("*.safetensors"))
    assert report["bytes_read"] == sum(path.stat().st_size for path in shards)
    assert report["shards_read"] == len(shards)
    assert report["bytes"] < report["bytes_read"]


NAN_BF16, INF_F32 = b"\xc0\x7f", struct.pack("<f", float("inf"))


@pytest.mark.parametrize(
    ("ending", "offset", "data", "word"),
    [
        (".w2.weight_scale", 37, b"\xff", "scale of 255"),
        (".o_proj.weight", 2 * 1001, NAN_BF16, "not finite"),
        (".dt_bias", 4 * 5, INF_F32, "not finite"),
        ("embed_tokens.weight", 0, NAN_BF16, "not finite"),
    ],
)
def test_the_first_bad_byte_is_named(folder: Path, ending: str, offset: int, data: bytes, word: str) -> None:
    path, name, at = damage(folder, ending, offset, data)
    code, report = verify(folder)
    assert code == 1
    (problem,) = report["problems"]
    for part in (path.name, name, word, f"byte {offset} of the tensor", f"byte {at} of the file"):
        assert part in problem


def test_a_non_zero_tail_of_a_log_is_refused(folder: Path) -> None:
    path, name, _ = damage(folder, ".A_log", 4 * 5, struct.pack("<f", 0.5))
    code, report = verify(folder)
    assert code == 1
    assert path.name in report["problems"][0]
    assert name in report["problems"][0]


def test_every_damaged_shard_is_reported(folder: Path) -> None:
    first, _, _ = damage(folder, ".w1.weight_scale", 0, b"\xff")
    second, _, _ = damage(folder, "lm_head.weight", 0, NAN_BF16)
    code, report = verify(folder, "--jobs", "3")
    assert code == 1
    assert [problem.split(":")[0] for problem in report["problems"]] == sorted([first.name, second.name])


def test_bytes_across_a_piece_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE", 4096)
    _, name, _ = damage(folder, ".o_proj.weight", 4096 * 3 + 2, NAN_BF16)
    code, report = verify(folder)
    assert code == 1
    assert name in report["problems"][0]
    assert f"byte {4096 * 3 + 2} of the tensor" in report["problems"][0]


def test_an_interrupted_run_resumes_and_fresh_does_not(folder: Path) -> None:
    path, _, _ = damage(folder, "lm_head.weight", 0, NAN_BF16)
    code, report = verify(folder)
    assert code == 1
    shards = report["shards_read"] + 1  # the damaged one was not finished
    code, report = verify(folder)
    assert code == 1, "a damaged shard is read again"
    assert report["shards_known_good"] == shards - 2
    assert report["bytes_read"] == 0
    _, again = verify(folder, "--fresh")
    assert again["shards_known_good"] == 0
    time = path.stat().st_mtime
    damage(folder, "lm_head.weight", 0, b"\0\0")
    os.utime(path, (time + 5, time + 5))
    code, report = verify(folder)
    assert (code, report["shards_read"]) == (0, 1)


def test_a_changed_shard_is_not_taken_for_known(folder: Path) -> None:
    assert verify(folder)[0] == 0
    path, _, _ = damage(folder, ".w1.weight_scale", 0, b"\xff")
    os.utime(path, (1, 1))
    assert verify(folder)[0] == 1


def test_checksums_are_compared_where_they_are(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    (folder / "SHA256SUMS").write_text(f"{sums[shards[0].name]}  ./{shards[0].name}\n")
    metadata = folder / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    (metadata / f"{shards[1].name}.metadata").write_text(f"commit\n{sums[shards[1].name]}\n1.0\n")
    (folder / f"{shards[2].name}.sha256").write_text(sums[shards[2].name] + "\n")
    code, report = verify(folder)
    assert (code, report["shards_hashed"]) == (0, 3)
    # Any code is valid: only the checksum can tell. Layer 1's experts are in the second shard.
    path, _, _ = damage(folder, ".w1.weight_packed", 3, b"\x5a")
    assert path == shards[1]
    code, report = verify(folder, "--fresh")
    assert code == 1
    (problem,) = report["problems"]
    assert problem.startswith(f"{path.name}: SHA-256")


def test_a_file_that_shrinks_after_its_header_was_read(folder: Path) -> None:
    manifest = verify_headers(folder)
    shard = next(iter(manifest.by_shard()))
    path = folder / shard
    os.truncate(path, path.stat().st_size - 100)
    problems = [r.problem for r in scan.scan(manifest, jobs=2, notes=scan.Notes(None)) if r.problem]
    assert len(problems) == 1
    assert "100 bytes early" in problems[0]


def test_headers_are_checked_first_and_json_says_why(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    code, report = verify(folder)
    assert code == 1
    assert shard.name in report["problems"][0]


def test_notes_that_cannot_be_written_do_not_stop_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert verify(folder)[0] == 0


def test_an_index_of_another_size_is_said(folder: Path) -> None:
    assert verify(folder)[1]["warnings"] == []
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 2
    path.write_text(json.dumps(index))
    code, report = verify(folder)
    (warning,) = report["warnings"]
    assert code == 0, "every tensor is there"
    assert str(index["metadata"]["total_size"]) in warning
    assert str(report["bytes"]) in warning


def test_a_shard_that_the_index_does_not_name_is_said(folder: Path) -> None:
    shutil.copy(next(folder.glob("*.safetensors")), folder / "model-00099-of-000099.safetensors")
    code, report = verify(folder)
    assert code == 0
    assert report["warnings"] == [
        "model-00099-of-000099.safetensors: not named by the index and not read; remove what is left over"
    ]
    done = CliRunner().invoke(app, ["verify", str(folder)])
    assert "warning: model-00099" in done.stdout.replace("\n", "")
