"""A checkpoint that one rank of several serves with another kind of layer: wide scales in that rank's part only.

Kernels have a variant for experts with an E8M0 byte above 128 (docs/notes/experts-hopper.md, design 2), chosen by a
layer and a rank for themselves. Tensor parallel ranks hold a share of every expert's width: rows of w1 and w3, columns
of w2. ``widen`` makes the last rank's lanes wide in a few experts of one layer, which until then was of one kind with
the layer before it. So a warm-up of one layer of each kind would leave it out on the other ranks and run it on
this one, which then waits in its collectives forever; that it does not is what ranks.py asks of real ranks (tp2wide).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: The largest byte that the kernels' usual variant takes, and the largest one written here.
USUAL, TOP = 128, 131
#: KDA layers 1 and 2 of the tiny K3 are of one kind: they read the same blocks of the bank, and neither writes one.
LAYER = 2
EXPERTS = (1, 4, 6)
GROUP = 32


def widen(folder: Path, ranks: int = 2, which: tuple[int, ...] | None = None) -> None:
    """Give the last rank of ``ranks`` (or those in ``which``) wide scales in :data:`EXPERTS` of :data:`LAYER`.

    folder: a checkpoint of ``write_tiny``, changed in place. In each of such a rank's runs of 32 lanes of the width:

    * w1: a row's first group of 32 inputs is one code of 0.5 beside zeros, its byte 129, 130 or 131: values of +-2, 4
      and 8 where a row of the random matrix has a norm of 2.2. Gates saturate at 4, so nothing grows.
    * w2: all bytes of the column group are raised by one number, so that the largest is 131.
    * w3: all bytes of these rows are lowered by the same number. What w2 multiplies is as much smaller as w2 is larger,
      so their product stays as it was, but for the up part's saturation (25 tanh(u / 25)), which these lanes lose.

    Groups of zeros keep their byte 0. Activations stay as large as they were, and runs can be compared as any others.
    """
    from safetensors.torch import load_file, save_file

    from k3_core.checkpoint import CheckpointReader, expert_width

    step = expert_width(CheckpointReader(folder).config, ranks)[0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = [name for name in index if re.search(rf"\.layers\.{LAYER}\..*\.experts\.\d+\.w1\.weight_packed$", name)]
    (shard,) = {folder / index[name] for name in names}
    tensors = load_file(shard)
    for expert in EXPERTS:
        (first,) = [name for name in names if f".experts.{expert}.w1." in name]
        for rank in (ranks - 1,) if which is None else which:
            for lane in range(rank * step, (rank + 1) * step, GROUP):
                _widen_lanes(tensors, first.removesuffix("w1.weight_packed"), lane)
    save_file(tensors, shard, metadata={"format": "pt"})


def _widen_lanes(tensors: dict[str, Tensor], expert: str, lane: int) -> None:
    """The three matrices of one expert, lanes ``lane`` to ``lane + 31``."""
    rows, column = slice(lane, lane + GROUP), lane // GROUP
    counted = torch.arange(GROUP)
    codes = torch.zeros(GROUP, GROUP, dtype=torch.uint8)
    codes[counted, counted] = (1 + 8 * (counted % 2)).to(torch.uint8)  # 0.5 and -0.5, each row's in another place
    tensors[f"{expert}w1.weight_packed"][rows, : GROUP // 2] = codes[:, 0::2] | codes[:, 1::2] << 4
    tensors[f"{expert}w1.weight_scale"][rows, 0] = (USUAL + 1 + counted % (TOP - USUAL)).to(torch.uint8)
    down, up = tensors[f"{expert}w2.weight_scale"][:, column], tensors[f"{expert}w3.weight_scale"][rows]
    shift = TOP - int(down.max())
    if not 0 < shift < int(up[up > 0].min()):
        raise ValueError(f"{expert}: w2 cannot be raised by {shift} and w3 lowered; its random values changed")
    down[down > 0] += shift
    up[up > 0] -= shift


def by_rank(folder: Path, ranks: int) -> list[list[int]]:
    """Layers with a scale byte above 128 in each tensor parallel rank's part, as the files and the loader's cut say."""
    from k3_core.checkpoint import CheckpointReader, Topology, shard_plan
    from k3_core.checkpoint.names import layer_of

    reader = CheckpointReader(folder)
    found: list[list[int]] = []
    for rank in range(ranks):
        plan = shard_plan(reader.config, Topology(tp_size=ranks, tp_rank=rank))
        scales = reader.tensors(plan, wanted=lambda name: name.endswith("weight_scale"))
        wide = {layer_of(name) for name, part in scales if int(part.max()) > USUAL}
        found.append(sorted(layer for layer in wide if layer is not None))
    return found


def right_facts(facts: list[dict[str, Any]], claimed: list[list[int]], variants: bool) -> bool:
    """Whether the engines' ranks hold wide scales where the files have them, and nowhere else.

    variants: the experts are in the kernels' layout. Then a rank that has the wide layer must count it as a kind of its
    own, and one that has not must not: the ranks of one engine would warm up other layers each for itself.
    """
    right = [one["wide_layers"] for one in facts] == claimed
    if variants:
        right &= [LAYER in one["kinds"] for one in facts] == [LAYER in layers for layers in claimed]
    return right
