"""Each layer of the served model against the reference on the layer's own inputs, and the logits of the whole.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python packages/k3-nvidia/benchmarks/model_check.py [--parts rank13,linear13]
        [--modes eager,graphs] [--layers 13] [--experts 896]

rank13: a checkpoint in the shapes of one rank of TP16 (6 heads of 128, 896 experts of width 192, hidden 7168), 13
layers in blocks of 3, the released vision tower, states of long memory; written on the device, read back by vLLM
through this wheel's loader. linear13: Kimi-Linear with heads of 128. Without a GPU the tiny presets take their place.

Eager, every decoder layer's inputs and outputs are recorded while a mixed batch is served (chunked prompts and decoding
rows in the same steps). Row by row the layer's output is compared with ``ReferenceK3.run_layer`` in fp32 on the very
inputs the served layer had, so nothing builds up from layer to layer; the bf16 reference on the same inputs is the
yardstick. Bounds (from the golden data, measured between two implementations of the released code): median row error
<= 0.02 of the row's norm, 95% of rows <= 0.04. A row whose router chose another expert is off by more, on either side:
more than 5% of rows may lie beyond 0.04 only if the bf16 reference has as many there (difference of two counts, three
sigma), and no row may be off by more than twice the bf16 reference's worst row of any layer.

Logits: log probabilities at every position of every prompt of at least 17, against the fp32 reference: rms <= 0.4 and
the same best token in at least 0.8 of them, or no worse than twice the bf16 reference (a router flip early in a prompt
lasts as long as the memory does, and hits one run or the other).

Generated: log probabilities of 8 tokens behind every prompt and behind two images, all in one batch, decoded step by
step (with CUDA graphs: in them); the rule is that of gpu_smoke.py. No kernel of this wheel may be compiled meanwhile.

What is written and read back goes to $K3_SCRATCH (14 GiB for rank13; /dev/shm saves the disk's time).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_smoke
import torch
from gpu_smoke import compiled_since, generate, model_of, prompts, say, start, stop
from runs import Remembering
from torch import Tensor

#: Prompts of one batch: shorter and longer than a chunk of 64, one longer than a step.
LENGTHS = (1, 5, 63, 65, 130, 300, 700)
STEP_TOKENS = 256
MEDIAN_BOUND, ROW_BOUND = 0.02, 0.04
RMS_BOUND, ARGMAX_BOUND, LEAST_POSITIONS = 0.4, 0.8, 17
#: Width and height of the images; the layers are compared on the first.
IMAGES = ((310, 224), (120, 200))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def checkpoint(part: str, work: Path, layers: int, experts: int) -> Path:
    """Write the checkpoint of a part and return its folder."""
    from k3_core.checkpoint import tiny_config, write_tiny
    from k3_core.checkpoint.tiny_config import layer_lists
    from k3_core.config import load_config

    if not torch.cuda.is_available():
        return write_tiny(work / part, "k3-13" if part == "rank13" else "linear", seed=3, long_memory=True)
    if part == "rank13":
        from k3_core.cli.tiny import rank_config

        raw, small = rank_config("tp16", layers).to_dict(), tiny_config("k3").to_dict()
        # The vocabulary of the tiny presets, for which a tokenizer can be written; nothing here depends on its size.
        names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: small["text_config"][name] for name in names}
        raw["text_config"] |= ids | {"attn_res_block_size": 3, "num_experts": experts}
        raw |= {name: small[name] for name in ("media_placeholder_token_id", *names[1:])}
        config = load_config(raw)
    else:
        text = gpu_smoke.tiny_text("linear", kernels=True) | {"hidden_size": 2304, "num_hidden_layers": layers}
        text["linear_attn_config"] |= layer_lists(layers)
        text |= {"moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_token": 8}
        config = tiny_config("linear", **text)
    return write_tiny(work / part, config, seed=3, long_memory=True, device="cuda")


# ------------------------------------------------------------------------------------------------------------ recording


@dataclass
class Layer:
    """Rows of one layer as served, step after step: prefix before and after [T, H], bank read [T, n, H]."""

    before: list[Tensor] = field(default_factory=list)
    bank: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)


class Recorder:
    """Records what goes in and out of every decoder layer of a model while ``on``."""

    def __init__(self, model: Any) -> None:
        self.on = False
        self.positions: list[Tensor] = []
        text_model = getattr(model, "language_model", model)
        self.layers = [Layer() for _ in text_model.model.layers]
        self._watch_positions(text_model)
        for index, layer in enumerate(text_model.model.layers):
            if layer.schedule is None:
                self._watch_plain(layer, self.layers[index])
            else:
                self._watch(layer, self.layers[index], layer.schedule.attn_blocks(index))

    def clear(self) -> None:
        self.positions.clear()
        for layer in self.layers:
            layer.before, layer.bank, layer.after = [], [], []

    def _watch_positions(self, text_model: Any) -> None:
        honest = text_model.forward

        def forward(input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.positions.append(positions.clone())
            return honest(input_ids, positions, *args, **kwargs)

        text_model.forward = forward

    def _watch(self, layer: Any, log: Layer, blocks: int) -> None:
        honest = layer.forward

        def forward(prefix: Tensor, delta: Tensor | None, bank: Tensor) -> tuple[Tensor, Tensor]:
            if self.on:
                log.before.append(prefix.clone() if delta is None else prefix + delta)
                log.bank.append(bank[:, :blocks].clone())
            prefix, delta = honest(prefix, delta, bank)
            if self.on:
                log.after.append(prefix.float() + delta.float())
            return prefix, delta

        layer.forward = forward

    def _watch_plain(self, layer: Any, log: Layer) -> None:
        honest = layer.forward_plain

        def forward(delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            if self.on:
                log.before.append(delta.clone() if residual is None else residual + delta)
                log.bank.append(delta.new_empty(delta.shape[0], 0, delta.shape[1]))
            delta, residual = honest(delta, residual)
            if self.on:
                log.after.append(residual.float() + delta.float())
            return delta, residual

        layer.forward_plain = forward


def rows_of(recorder: Recorder, sequences: list[list[int]], embed: Tensor) -> list[Tensor]:
    """For every sequence the indices of its rows in the recorded steps laid end to end, in order of position.

    A row belongs to the sequence whose next position it has and whose embedded token it carries. Rows that fit no
    sequence (padding) are left out; a sequence with missing rows is an error.
    """
    positions = torch.cat(recorder.positions).tolist()
    first = torch.cat(recorder.layers[0].before)
    if len(positions) != first.shape[0]:
        raise AssertionError(f"{len(positions)} positions for {first.shape[0]} rows: the model saw padding")
    found: list[list[int]] = [[] for _ in sequences]
    last = 0
    for row, position in enumerate(positions):
        for candidate in (last, *range(len(sequences))):
            ids = sequences[candidate]
            if len(found[candidate]) == position < len(ids) and torch.equal(first[row], embed[ids[position]]):
                found[candidate].append(row)
                last = candidate
                break
    for number, (rows, ids) in enumerate(zip(found, sequences, strict=True)):
        if len(rows) < len(ids) - 1:  # the last token is sampled, never fed
            raise AssertionError(f"sequence {number}: {len(rows)} of {len(ids)} rows were recorded")
    return [torch.tensor(rows, device=first.device) for rows in found]


# ----------------------------------------------------------------------------------------------------------- comparison


def compare_layers(recorder: Recorder, rows: list[Tensor], exact: Any, rounded: Any) -> list[dict[str, Any]]:
    """One line a layer: errors of its output rows on its own inputs, ours and the bf16 reference's."""
    lines = []
    text = exact.config.text
    for index, layer in enumerate(recorder.layers):
        before, bank, after = (torch.cat(x) for x in (layer.before, layer.bank, layer.after))
        ours, theirs, step = [], [], []
        for chosen in rows:
            expected = exact.run_layer(index, before[chosen], bank[chosen]).prefix.float()
            size = expected.norm(dim=-1)
            bf16 = rounded.run_layer(index, before[chosen], bank[chosen]).prefix.float()
            error = (after[chosen] - expected).norm(dim=-1)
            ours.append(error / size)
            theirs.append((bf16 - expected).norm(dim=-1) / size)
            change = expected if bank.shape[1] < exact_blocks(exact, index) else expected - before[chosen].float()
            step.append(error / change.norm(dim=-1))
        mine, other, delta = (torch.cat(x) for x in (ours, theirs, step))
        line = {
            "layer": index,
            "kind": text.layer_kind(index) + ("+moe" if text.is_moe_layer(index) else "+dense"),
            "rows": mine.numel(),
            "median": float(mine.median()),
            "p95": float(mine.quantile(0.95)),
            "max": float(mine.max()),
            "median_bf16_reference": float(other.median()),
            "p95_bf16_reference": float(other.quantile(0.95)),
            "max_bf16_reference": float(other.max()),
            "median_of_change": float(delta.median()),
        }
        line["beyond"], line["beyond_bf16_reference"] = (int((x > ROW_BOUND).sum()) for x in (mine, other))
        lines.append({k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()})
    worst = 2 * max(line["max_bf16_reference"] for line in lines)
    for line in lines:
        line["ok"] = layer_ok(line, worst)
    return lines


def layer_ok(line: dict[str, Any], worst: float) -> bool:
    """Whether a line keeps the bounds of the first words above; ``worst``: the most that a row may be off."""
    ours, theirs = line["beyond"], line["beyond_bf16_reference"]
    few = ours <= 0.05 * line["rows"] or ours - theirs <= 3 * math.sqrt(ours + theirs)
    return bool(few and line["median"] <= MEDIAN_BOUND and line["max"] <= max(worst, ROW_BOUND))


def exact_blocks(exact: Any, index: int) -> int:
    """Bank blocks after layer ``index`` began: more than before where the layer starts a block."""
    from k3_core.contracts.attn_res import Schedule

    text = exact.config.text
    if text.attn_res_block_size is None:
        return 0
    return Schedule(text.num_hidden_layers, text.attn_res_block_size).mlp_blocks(index)


def prompt_logprobs(llm: Any, ids: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, detokenize=False, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in ids], sampling, use_tqdm=False)


def compare_logits(outputs: list[Any], ids: list[list[int]], exact: Any, rounded: Any) -> list[dict[str, Any]]:
    """One line a prompt of enough positions: distances of the log probabilities from fp32, ours and bf16's.

    exact, rounded: the references, each a ``Remembering``.
    """
    lines = []
    for prompt, output in zip(ids, outputs, strict=True):
        if len(prompt) < LEAST_POSITIONS:
            continue
        whole = torch.tensor(prompt)
        reference = exact.logits(whole).float().log_softmax(-1)
        bf16 = rounded.logits(whole).float().log_softmax(-1)
        ours, theirs, agree = [], [], 0
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            best = max(entries, key=lambda token: entries[token].logprob)
            agree += int(reference[position].argmax()) == best
            tokens = torch.tensor(list(entries), device=reference.device)
            values = torch.tensor([e.logprob for e in entries.values()], device=reference.device)
            ours.append(values - reference[position, tokens])
            theirs.append(bf16[position, tokens] - reference[position, tokens])
        mine, other = torch.cat(ours), torch.cat(theirs)
        positions = len(prompt) - 1
        agreement = agree / positions
        same = float((bf16.argmax(-1) == reference.argmax(-1)).float().mean())
        rms, rms_bf16 = (float(x.square().mean().sqrt()) for x in (mine, other))
        ok = rms <= max(RMS_BOUND, 2 * rms_bf16) and agreement >= min(ARGMAX_BOUND, 2 * same - 1)
        lines.append(
            {
                "positions": positions,
                "rms": round(rms, 4),
                "rms_bf16_reference": round(rms_bf16, 4),
                "argmax_agreement": round(agreement, 4),
                "argmax_agreement_bf16_reference": round(same, 4),
                "ok": ok,
            }
        )
    return lines


# ---------------------------------------------------------------------------------------------------------------- parts


def watch_loading() -> None:
    """Say how much memory the loading of weights took at its peak."""
    from vllm.v1.worker.gpu_worker import Worker

    honest = Worker.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.monotonic()
        result = honest(self, *args, **kwargs)
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        gib = {"loaded_gib": after - before, "peak_gib": peak - before}
        say(load={k: round(v / 2**30, 3) for k, v in gib.items()}, load_s=round(time.monotonic() - began, 1))
        return result

    Worker.load_model = load_model


def check(part: str, modes: list[str], work: Path, layers: int, experts: int) -> bool:
    """Serve and compare; every line says ``ok``."""
    began = time.monotonic()
    folder = checkpoint(part, work, layers, experts)
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(part=part, wrote_gib=round(size / 2**30, 2), seconds=round(time.monotonic() - began, 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = part == "rank13"
    good = True
    references: list[Remembering] = []
    for mode in modes:
        options: dict[str, Any] = {"max_num_batched_tokens": STEP_TOKENS, "enable_prefix_caching": False}
        if mode == "eager" or device == "cpu":
            options["enforce_eager"] = True
        else:
            options["compilation_config"] = gpu_smoke.GRAPHS
        began = time.monotonic()
        llm = start(folder, skip_tokenizer_init=part != "rank13", **options)
        say(part=part, mode=mode, start_s=round(time.monotonic() - began, 1), model=type(model_of(llm)).__name__)
        compiled_since()
        if not references:
            began = time.monotonic()
            references = [Remembering(model) for model in load_references(folder, device, packed)]
            say(part=part, reference_s=round(time.monotonic() - began, 1))
        for line in lines_of(mode, llm, *references):
            say(part=part, mode=mode, **line)
            good &= line["ok"]
        stop(llm)
        del llm
    return good


def load_references(folder: Path, device: str, packed: bool) -> tuple[Any, Any]:
    """The reference in fp32 and in bf16, read once and in host memory first; experts in MXFP4 are the same tensors.

    What is stored in bf16 is exact in fp32, and what is stored in fp32 stays so in both.
    """
    from k3_core.reference import load_model

    read = load_model(folder, torch.bfloat16, "cpu", packed_experts=packed)
    rounded = copy.copy(read)
    rounded.weights = changed(read.weights, lambda t: t.to(device))
    exact = copy.copy(read)
    exact.weights = changed(rounded.weights, lambda t: t.float() if t.dtype == torch.bfloat16 else t)
    return exact, rounded


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of dataclasses, tuples and lists with every tensor replaced by ``change`` of it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(changed(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: changed(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def lines_of(mode: str, llm: Any, exact: Remembering, rounded: Remembering) -> Iterator[dict[str, Any]]:
    """Every comparison of one engine, as it ends."""
    if mode == "eager":
        yield from layer_lines(llm, exact, rounded)
    ids = prompts(LENGTHS, seed=1, vocabulary=500)
    for line in compare_logits(prompt_logprobs(llm, ids), ids, exact, rounded):
        yield {"check": "logits", **line}
    yield generated_line(llm, ids, exact, rounded)
    late = compiled_since()
    yield {"check": "compiled while serving", "kernels": late, "ok": not late}


def layer_lines(llm: Any, exact: Remembering, rounded: Remembering) -> Iterator[dict[str, Any]]:
    """The per-layer comparison of a text batch and, with vision, of an image prompt and its features."""
    recorder = Recorder(model_of(llm))
    ids = prompts(LENGTHS, seed=1, vocabulary=500)
    recorder.on = True
    outputs = generate(llm, ids)
    recorder.on = False
    sequences = [p + list(o.outputs[0].token_ids) for p, o in zip(ids, outputs, strict=True)]
    rows = rows_of(recorder, sequences, rounded.model.weights.embed)
    for line in compare_layers(recorder, rows, exact.model, rounded.model):
        yield {"check": "layer", **line}
    recorder.clear()
    pictured = pictures(exact.model.config)
    if not pictured:
        return
    prompt, image = pictured[0]
    recorder.on = True
    generate(llm, [prompt], [image])
    recorder.on = False
    served = torch.cat(recorder.layers[0].before)
    rows = [torch.arange(served.shape[0], device=served.device)]
    for line in compare_layers(recorder, rows, exact.model, rounded.model):
        yield {"check": "layer of image prompt", **line}
    expected = exact.model.embed(prompt, [image])[: served.shape[0]]
    bf16 = rounded.model.embed(prompt, [image])[: served.shape[0]].float()
    error, yardstick = (float((x.float() - expected).square().mean().sqrt()) for x in (served[: len(bf16)], bf16))
    ok = error <= 2 * yardstick + 1e-3
    facts = {"rms": round(error, 5), "rms_bf16_reference": round(yardstick, 5)}
    yield {"check": "image features", **facts, "ok": ok}
    recorder.clear()


def pictures(config: Any) -> list[tuple[list[int], Any]]:
    """Prompts with their image of random pixels; none without vision."""
    from k3_core.vllm.testing.rank_engine import noise_image

    if config.vision is None:
        return []
    pad = config.media_placeholder_token_id
    return [([7, 8, 9 + i, pad, 10, 11], noise_image(*size, seed=i)) for i, size in enumerate(IMAGES)]


def generated_line(llm: Any, ids: list[list[int]], exact: Remembering, rounded: Remembering) -> dict[str, Any]:
    """Texts and images in one batch, and what is generated behind them against the references."""
    pictured = pictures(exact.model.config)
    asked = ids + [prompt for prompt, _ in pictured]
    images = [None] * len(ids) + [image for _, image in pictured]
    outputs = generate(llm, asked, images)
    found = gpu_smoke.compare(outputs, asked, exact, rounded, images)
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    found["ok"] &= found["finite"]
    return {"check": "generated", "requests": len(asked), "token_sum": sum(tokens), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="rank13,linear13")
    parser.add_argument("--modes", default="eager,graphs" if torch.cuda.is_available() else "eager")
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--experts", type=int, default=896)
    options = parser.parse_args()
    gpu_smoke.LOG = "model_check.jsonl"
    gpu_smoke.prepare()
    if torch.cuda.is_available():
        watch_loading()
    failed = []
    for part in options.parts.split(","):
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(dir=os.environ.get("K3_SCRATCH")) as work:
                if not check(part, options.modes.split(","), Path(work), options.layers, options.experts):
                    failed.append(part)
        except BaseException:
            traceback.print_exc()
            failed.append(part)
        say(part=part, seconds=round(time.monotonic() - began, 1), ok=part not in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
