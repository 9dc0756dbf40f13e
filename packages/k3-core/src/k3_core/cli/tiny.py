"""`k3 tiny`: random checkpoints in the released layout, and configurations with the shapes of one rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from k3_core.checkpoint import check_topology, expert_width, tiny_config, write_tiny
from k3_core.checkpoint.slicing import Topology
from k3_core.checkpoint.tiny import whole_folder, write_side_files
from k3_core.checkpoint.tiny_config import END_OF_MESSAGE, MEDIA_PAD, NUM_SPECIALS, PAD, PRESETS, layer_lists
from k3_core.cli import output
from k3_core.cli.plan.command import RELEASED_CONFIG
from k3_core.config import K3Config, load_config
from k3_core.config.model import MAX_PIECES
from k3_core.errors import ConfigError


def tiny(
    path: Annotated[Path, typer.Argument(help="Folder to write.")],
    preset: Annotated[str, typer.Option(help="k3, k3-13 or linear.")] = "k3",
    layers: Annotated[
        int | None, typer.Option(min=1, max=MAX_PIECES, help="Layers, laid out in the released pattern.")
    ] = None,
    like_rank: Annotated[str | None, typer.Option(
        help="Shapes of one rank of the release, such as tp16: configuration only, for dummy weights.")] = None,
    text_only: Annotated[bool, typer.Option(help="With --like-rank: leave out the vision tower.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all weights.")] = 0,
    long_memory: Annotated[bool, typer.Option(help="States that survive hundreds of tokens.")] = False,
    force: Annotated[
        bool, typer.Option(help="Write into a folder that holds files, over those of the same names.")
    ] = False,
    as_json: output.AsJson = False,
) -> None:  # fmt: skip
    """Write a random checkpoint in the released layout, tokenizer and processor files included."""
    _check_target(path, force)
    if like_rank is not None:
        _check_unused(preset, seed, long_memory)
        config = rank_config(like_rank, layers or 8, text_only=text_only)
        write_rank(path, config)
        what = (
            f"configuration of one {like_rank} rank, {config.text.num_hidden_layers} layers, no weights, no tokenizer"
        )
    else:
        if preset not in PRESETS:
            raise ConfigError(f"--preset {preset} is unknown: expected one of {', '.join(PRESETS)}")
        if text_only:
            raise ConfigError("--text-only goes with --like-rank; for a tiny text model use --preset linear")
        config = tiny_config(preset) if layers is None else tiny_config(preset, num_hidden_layers=layers)
        write_tiny(path, config, seed, long_memory=long_memory)
        what = f"random {preset} checkpoint, {config.text.num_hidden_layers} layers, seed {seed}"
    if as_json:
        output.emit({"path": str(path), "what": what, "layers": config.text.num_hidden_layers,
                     "weights": like_rank is None})  # fmt: skip
    else:
        output.say(f"wrote {path}: {what}")


def _check_target(path: Path, force: bool) -> None:
    """Refuse to write over what somebody else may need: a downloaded checkpoint has files of the same names."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: is a file; name a folder")
    if not force and path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"{path}: holds files already; name a new folder, or replace those of the same names: --force"
        )


def _check_unused(preset: str, seed: int, long_memory: bool) -> None:
    for option, given in (("--preset", preset != "k3"), ("--seed", seed != 0), ("--long-memory", long_memory)):
        if given:
            raise ConfigError(
                f"{option} has no meaning with --like-rank, which writes the release's shapes, no weights"
            )


def write_rank(path: Path, config: K3Config) -> None:
    """Write a rank's configuration and processor files; no tokenizer, since measuring sends token ids.

    vLLM derives a missing ``head_dim`` from hidden size and heads and refuses an odd one (TP8: 7168 / 12 = 597), so one
    is stated; nothing that serves K3 reads it.
    """
    with whole_folder(path) as folder:
        write_side_files(folder, config, tokenizer=False)
        file = folder / "config.json"
        raw = json.loads(file.read_text())
        raw.get("text_config", raw)["head_dim"] = config.text.linear_attn.head_dim
        file.write_text(json.dumps(raw, indent=1) + "\n")


def rank_config(rank: str, layers: int, *, text_only: bool = False) -> K3Config:
    """The released configuration with the sizes one rank computes with, to be served with TP 1 and dummy weights.

    Heads, dense width, shared width, expert width and vocabulary are divided by the TP size; what a rank holds whole
    (hidden and latent width, low ranks, all experts, vision) stays. The expert width is the unpadded one (TP16: 192).

    Args:
        rank: ``tp`` and a size that divides the model, for example ``tp16``.
        layers: number of layers, in the released pattern (every fourth and the last are MLA, layer 0 is dense).
        text_only: leave out vision, giving a `KimiLinearForCausalLM` configuration.

    Raises ConfigError for another spelling or a size that does not divide.
    """
    match = re.fullmatch(r"tp(\d{1,6})", rank.lower())
    if match is None:
        raise ConfigError(f"--like-rank {rank}: expected tp and a size, for example tp16")
    tp = int(match[1])
    released = load_config(RELEASED_CONFIG)
    if tp < 1:
        raise ConfigError(f"--like-rank {rank}: the size must be at least 1")
    check_topology(released, Topology(tp_size=tp))
    raw = released.to_dict()
    text, whole = raw["text_config"], released.text
    vocab = -(-whole.vocab_size // tp)
    text |= {
        "num_hidden_layers": layers,
        "num_attention_heads": whole.num_attention_heads // tp,
        "num_key_value_heads": whole.num_key_value_heads // tp,
        "intermediate_size": whole.intermediate_size // tp,
        "moe_intermediate_size": expert_width(released, tp)[0],
        "vocab_size": vocab,
    }
    text["linear_attn_config"] |= {"num_heads": whole.linear_attn.num_heads // tp, **layer_lists(layers)}
    first = vocab - NUM_SPECIALS
    ids = {"bos_token_id": first, "eos_token_id": first + END_OF_MESSAGE, "pad_token_id": first + PAD}
    text |= ids
    if text_only:
        return load_config(text)
    return load_config(raw | ids | {"media_placeholder_token_id": first + MEDIA_PAD})
