"""What cannot be served is refused while vLLM settles its configuration: in seconds, by name, before weights load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from safetensors.torch import load_file, save_file
from serve_support import Engine, Server, require_plugin

pytestmark = pytest.mark.serve

Damage = Callable[[Path], None]


def settle(checkpoint: Path, **options: Any) -> Any:
    """vLLM's configuration for ``checkpoint``, as the server makes it before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    require_plugin()
    defaults: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 512}
    return EngineArgs(**{**defaults, **options}).create_engine_config()


@pytest.fixture
def copy(long_memory_tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(long_memory_tiny, tmp_path / "checkpoint"))


def test_an_intact_checkpoint_is_accepted(long_memory_tiny: Path) -> None:
    config = settle(long_memory_tiny)
    assert config.scheduler_config.enable_chunked_prefill
    assert config.model_config.tokenizer_mode == "kimi_k3"
    assert config.model_config.quantization is None


@pytest.mark.parametrize("width", ["bfloat16", "float32"])
def test_both_dtypes_are_accepted(long_memory_tiny: Path, width: str) -> None:
    assert settle(long_memory_tiny, dtype=width).model_config.dtype == getattr(torch, width)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor parallel": ({"tensor_parallel_size": 2}, "--tensor-parallel-size 1"),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
    "float16": ({"dtype": "float16"}, "--dtype float32"),
    "LoRA": ({"enable_lora": True}, "LoRA"),
    "draft model": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "draft"),
    "KV transfer": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "disaggregation",
    ),
    "weight offload": ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
    "weight prefetch": ({"offload_group_size": 2}, "--offload-group-size"),
    "KV cache dtype": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    "state dtype": ({"mamba_ssm_cache_dtype": "float16"}, "--mamba-ssm-cache-dtype float16"),
    "quantization": ({"quantization": "fp8"}, "--quantization"),
    "processor options": ({"mm_processor_kwargs": {"max_pixels": 1}}, "--mm-processor-kwargs"),
    "image embeddings": ({"enable_mm_embeds": True}, "--enable-mm-embeds"),
    "micro-batches": ({"enable_dbo": True}, "--enable-dbo"),
    "dummy weights": ({"load_format": "dummy"}, "k3 tiny"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_unsupported_option_is_refused_by_name(what: str, long_memory_tiny: Path) -> None:
    options, words = REFUSED[what]
    with pytest.raises(ValueError, match="(?s).*" + words) as caught:
        settle(long_memory_tiny, **options)
    assert str(caught.value).count(words) == 1


def edit(folder: Path, shard: int, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of one shard."""
    path = sorted(folder.glob("*.safetensors"))[shard]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1000])


def remove_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[2].unlink()


def drop_a_tensor(folder: Path) -> None:
    name = "language_model.model.layers.1.self_attn.b_proj.weight"
    edit(folder, 1, lambda tensors: tensors.pop(name))


def change_a_dtype(folder: Path) -> None:
    name = "language_model.model.layers.1.self_attn.A_log"
    edit(folder, 1, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))


def add_a_tensor(folder: Path) -> None:
    edit(folder, 1, lambda tensors: tensors.update({"language_model.model.layers.1.self_attn.extra": torch.zeros(3)}))


def drop_a_key(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["moe_renormalize"]
    path.write_text(json.dumps(config))


def break_the_layers(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["linear_attn_config"]["kda_layers"].pop()
    path.write_text(json.dumps(config))


DAMAGED: dict[str, tuple[Damage, str]] = {
    "truncated shard": (truncate, "cut short"),
    "missing shard": (remove_a_shard, "does not exist"),
    "missing tensor": (drop_a_tensor, "self_attn.b_proj.weight"),
    "wrong dtype": (change_a_dtype, "self_attn.A_log"),
    "extra tensor": (add_a_tensor, "self_attn.extra"),
    "missing key": (drop_a_key, "moe_renormalize"),
    "contradiction": (break_the_layers, "kda_layers"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_checkpoint_is_refused_before_anything_starts(what: str, copy: Path) -> None:
    damage, words = DAMAGED[what]
    damage(copy)
    with pytest.raises(ValueError, match="(?s).*" + words):
        settle(copy)


@pytest.mark.slow
def test_a_nan_scale_ends_the_load_with_its_name(copy: Path) -> None:
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
    edit(copy, 1, lambda tensors: tensors[name].view(-1)[5:6].fill_(255))
    with pytest.raises(ValueError, match=r"(?s)experts\.3\.w2\.weight_scale.*NaN"):
        Engine.start(copy)


@pytest.mark.slow
def test_the_server_ends_with_the_reason_and_starts_no_engine(copy: Path, tmp_path: Path) -> None:
    truncate(copy)
    server = Server(copy, tmp_path / "log", "--dtype", "float32")
    try:
        assert server.process.wait(300) != 0
    finally:
        server.stop()
    log = server.log.read_text()
    assert log.count("cut short") == 1
    assert "EngineCore" not in log
