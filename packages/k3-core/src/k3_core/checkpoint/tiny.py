"""Writing checkpoints: tiny random ones in the released layout, and any others shard by shard."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from k3_core.checkpoint.names import layer_of
from k3_core.checkpoint.table import TensorSpec, tensor_table
from k3_core.checkpoint.tiny_config import NUM_SPECIALS, PRESETS, tiny_config
from k3_core.checkpoint.tiny_vocab import K3_SPECIALS, LINEAR_SPECIALS, tiktoken_file, tokenizer_config
from k3_core.checkpoint.tiny_weights import random_tensor
from k3_core.config import K3Config, load_config
from k3_core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"


def write_tiny(
    path: str | Path,
    config: Any = "k3",
    seed: int = 0,
    *,
    long_memory: bool = False,
    a_log_padding: int = 2,
    device: str = "cpu",
) -> Path:
    """Write a random checkpoint in the released layout.

    Args:
        path: folder to create; files of the same names are replaced.
        config: a preset of `tiny_config` ("k3", "k3-13", "linear"), or anything `load_config` accepts.
        seed: of all weights. The same seed, configuration and kind of device give the same bytes.
        long_memory: weights whose KDA state survives hundreds of tokens, so that a lost state shows in the logits.
        a_log_padding: zero values behind the heads of A_log (K3 only; the release has 32 behind 96).
        device: where values are drawn; "cuda" makes gigabytes in seconds, with other values than "cpu".

    Returns:
        The folder. It holds config.json, generation_config.json, the shards with their index, a working tokenizer
        (tiktoken.model, tokenizer_config.json) and, with vision, preprocessor_config.json.

    Raises:
        ConfigError: a configuration that contradicts itself, or a vocabulary too small for the tokenizer.
        CheckpointError: the folder cannot be written; then nothing of the checkpoint is in it.
    """
    parsed = tiny_config(config) if isinstance(config, str) and config in PRESETS else load_config(config)
    table = tensor_table(parsed)
    if not parsed.is_kimi_linear:
        length = parsed.text.linear_attn.num_heads + a_log_padding
        table |= {n: TensorSpec((length,), s.dtype) for n, s in table.items() if n.endswith(".A_log")}
    with whole_folder(Path(path)) as folder:
        write_side_files(folder, parsed)
        write_shards(folder, _random_shards(parsed, table, seed, long_memory, device))
    return Path(path)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder inside ``path`` to write into; its files are moved into ``path`` when the block ends without an error.

    So ``path`` never holds half of what was meant, and what it held before stays until then. Files of the same names
    are replaced; a folder that was made for nothing is removed. Raises CheckpointError where the disk refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix=".k3-", dir=path) as unfinished:
                yield Path(unfinished)
                for file in sorted(Path(unfinished).iterdir()):
                    file.replace(path / file.name)
        finally:
            if not any(path.iterdir()):
                path.rmdir()
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: cannot be written ({reason}); check the path, its permissions and the room on its disk"
        ) from error


def write_side_files(folder: Path, config: K3Config, *, tokenizer: bool = True) -> None:
    """Write all but weights: config.json, generation_config.json, tokenizer and, with vision, the processor's file.

    Raises ConfigError where the vocabulary does not fit the built-in tokenizer; ``tokenizer=False`` leaves it out.
    """
    if tokenizer:
        write_tokenizer(folder, config)
    write_json(folder / "config.json", config.to_dict())
    write_json(folder / "generation_config.json", _generation_config(config))
    if config.vision is not None:
        write_json(folder / "preprocessor_config.json", _preprocessor_config(config))


def write_shards(folder: Path, shards: Iterator[tuple[str, dict[str, Tensor]]]) -> Path:
    """Write (file name, tensors) one after the other, then the index. One shard is in memory at a time.

    Returns the path of the index, whose `total_size` counts tensor bytes as the release does.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for name, tensors in shards:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors creates files for their owner only
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    index = folder / INDEX_NAME
    write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return index


def shard_of(name: str, config: K3Config) -> int:
    """0-based shard of a tensor as released: layer L in shard L, then the rest of the text model, projector, tower."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    last = config.text.num_hidden_layers
    if name.startswith("mm_projector."):
        return last + 1
    return last + 2 if name.startswith("vision_tower.") else last


def shard_name(index: int, config: K3Config) -> str:
    """File name of the 0-based shard, with the release's mix of five and six digits."""
    count = config.text.num_hidden_layers + (1 if config.vision is None else 3)
    return f"model-{index + 1:05d}-of-{count:06d}.safetensors"


def write_tokenizer(folder: Path, config: K3Config) -> None:
    """Write tiktoken.model and tokenizer_config.json for the configuration's vocabulary size."""
    num_ranks = config.text.vocab_size - NUM_SPECIALS
    specials = LINEAR_SPECIALS if config.is_kimi_linear else K3_SPECIALS
    (folder / "tiktoken.model").write_text(tiktoken_file(num_ranks), encoding="ascii")
    write_json(folder / "tokenizer_config.json", tokenizer_config(specials, num_ranks))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with one space of indentation and a final newline."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _random_shards(
    config: K3Config, table: dict[str, TensorSpec], seed: int, long_memory: bool, device: str
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    names: dict[int, list[str]] = {}
    for name in table:
        names.setdefault(shard_of(name, config), []).append(name)
    for index in sorted(names):
        tensors: dict[str, Tensor] = {}
        for name in names[index]:
            tensors |= random_tensor(name, table[name], config, seed, long_memory=long_memory, device=device)
        yield shard_name(index, config), tensors


def _generation_config(config: K3Config) -> dict[str, Any]:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "transformers_version": "4.56.2",
    }


def _preprocessor_config(config: K3Config) -> dict[str, Any]:
    """The released image settings (K3-SPEC 1.5) with the tower's patch size and merge."""
    assert config.vision is not None
    return {
        "auto_map": {
            "AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor",
            "AutoProcessor": "kimi_k3_processor.KimiK3Processor",
        },
        "image_processor_type": "KimiK3VisionProcessor",
        "media_proc_cfg": {
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "in_patch_limit": 65536,
            "in_patch_limit_each_frame": 16384,
            "merge_kernel_size": config.vision.merge_kernel_size[0],
            "patch_limit_on_one_side": 512,
            "patch_size": config.vision.patch_size,
            "sample_fps": 8.0,
            "temporal_merge_kernel_size": 4,
            "transparent_bg_config": {
                "chessboard_gray_value": 180,
                "chessboard_square_on_top_left": True,
                "chessboard_square_size": 8,
                "chessboard_white_value": 255,
                "pattern": "chessboard",
            },
            "transparent_bg_fill_stage": "after_resize",
        },
        "processor_class": "KimiK3Processor",
    }
