"""Where a checkpoint named by its place on the hub lies on this machine; nothing is fetched."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from k3_core.vllm.compat import checkpoint_folder

MODEL: Any = SimpleNamespace(model="someone/some-k3", revision=None)


def cached(cache: Path, commit: str) -> Path:
    """A folder as the hub's client lays it out."""
    folder = cache / "models--someone--some-k3"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text("{}")
    return folder / "snapshots" / commit


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert checkpoint_folder(SimpleNamespace(model=str(tmp_path), revision=None)) == tmp_path


def test_the_download_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "default"))
    default, elsewhere = cached(tmp_path / "default", "a" * 40), cached(tmp_path / "elsewhere", "b" * 40)
    for directory, wanted in ((None, default), (str(tmp_path / "elsewhere"), elsewhere)):
        config: Any = SimpleNamespace(load_config=SimpleNamespace(download_dir=directory))
        monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda config=config: config)
        assert checkpoint_folder(MODEL) == wanted
