"""The whole model in plain PyTorch: the oracle that every vendor's model is compared with.

One sequence at a time, no kernels, no batching: ids (and images) -> embeddings -> decoder layers -> output mix -> final
norm -> logits. Accuracy before speed; it runs in float64, float32 or bfloat16 on any device PyTorch knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from k3_core.config import K3Config, load_config
from k3_core.contracts._common import linear
from k3_core.contracts.norm import rms_norm
from k3_core.errors import UnsupportedError
from k3_core.multimodal import ImageSettings, load_image_settings
from k3_core.reference.cache import Cache, LayerState
from k3_core.reference.embedding import embed_text, embed_with_images, encode_images
from k3_core.reference.layers import LayerOutput, decoder_layer, mix
from k3_core.reference.loading import read_weights
from k3_core.reference.weights import ModelWeights

Ids = Sequence[int] | Tensor


@dataclass(frozen=True)
class Output:
    """The result of a forward pass over T tokens.

    logits [T, vocab] (float32; float64 in an fp64 model); hidden [T, H]: output mix, before the final norm; prefix
    [T, H] and bank [T, n, H] after the last layer (n = 0 in Kimi-Linear). If recorded: layers, every layer's output;
    mix_probs, the softmax [T, n + 1] of every mix with at least one bank block, in execution order, output mix last.
    """

    logits: Tensor
    hidden: Tensor
    prefix: Tensor
    bank: Tensor
    layers: tuple[LayerOutput, ...]
    mix_probs: list[Tensor]

    def aux_prefix(self, k: int) -> Tensor:
        """Auxiliary hidden state "after k layers", default reading: the prefix sum, [T, H]; k from 1."""
        return self._layer(k - 1).prefix

    def aux_mix(self, k: int) -> Tensor:
        """Auxiliary hidden state, attn_res reading: the mix that layer k sees before its norm; k = layers: `hidden`."""
        return self.hidden if k == len(self.layers) else self._layer(k).attention_input

    def _layer(self, index: int) -> LayerOutput:
        if not 0 <= index < len(self.layers):
            raise IndexError(f"no record of layer {index}; {len(self.layers)} layers were recorded (record=True)")
        return self.layers[index]


class ReferenceK3:
    """A loaded model; `load_model` makes one. All methods are free of gradients and of hidden state."""

    def __init__(self, config: K3Config, weights: ModelWeights, images: Path | ImageSettings | None = None) -> None:
        """`images`: settings, or the folder of the preprocessor_config.json to read when the first image comes."""
        self.config = config
        self.weights = weights
        self._images = images

    @property
    def dtype(self) -> torch.dtype:
        """dtype of weights and activations."""
        return self.weights.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embed.device

    @property
    def image_settings(self) -> ImageSettings:
        """How images are prepared.

        Raises UnsupportedError for a model without vision, ConfigError where the preprocessor config is not usable.
        """
        if self.weights.tower is None:
            raise UnsupportedError("this model takes text only: its configuration has no vision tower")
        if self._images is None:
            raise UnsupportedError("this model was built without image settings; pass ImageSettings to ReferenceK3")
        if isinstance(self._images, Path):
            self._images = load_image_settings(self._images)
        return self._images

    def logits(self, input_ids: Ids, images: Sequence[Image.Image] | None = None) -> Tensor:
        """Logits at every position, [T, vocab] float32 (float64): T counts the tokens images expand to.

        input_ids [T] hold one media pad an image. Raises ValueError for empty or out-of-range ids, ImageError for
        images that are unusable or do not match the pads.
        """
        return self.forward(self.embed(input_ids, images)).logits

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Ids,
        n: int,
        images: Sequence[Image.Image] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> list[int]:
        """`n` greedy tokens after the prompt (fewer if one of `stop_ids` comes, which is included)."""
        cache = self.new_cache()
        inputs = self.embed(input_ids, images)
        tokens: list[int] = []
        while len(tokens) < n:
            token = int(self.forward(inputs, cache, last_only=True).logits[-1].argmax())
            tokens.append(token)
            if token in stop_ids:
                break
            inputs = self.embed([token])
        return tokens

    def new_cache(self) -> Cache:
        """The states of a new sequence."""
        return Cache.empty(self.config.text, self.dtype, self.device)

    @torch.inference_mode()
    def embed(self, input_ids: Ids, images: Sequence[Image.Image] | None = None) -> Tensor:
        """Input embeddings [T, H]; with images T counts their expanded tokens. Errors as in `logits`."""
        ids = self._checked_ids(input_ids)
        if not images:
            return embed_text(ids, self.weights)
        return embed_with_images(ids, images, self.weights, self.config, self.image_settings)

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Image.Image]) -> tuple[Tensor, list[int]]:
        """(features [L, H] of all images one after the other, tokens of each)."""
        return encode_images(images, self.weights, self.image_settings)

    @torch.inference_mode()
    def forward(
        self, embeddings: Tensor, cache: Cache | None = None, *, record: bool = False, last_only: bool = False
    ) -> Output:
        """The text model on the next T tokens of a sequence, embeddings [T, H].

        cache: what earlier tokens left behind; it is advanced by T tokens. None: a sequence of its own.
        record: keep every layer's output. last_only: logits of the last token only, [1, vocab].
        """
        text, weights = self.config.text, self.weights
        cache = self.new_cache() if cache is None else cache
        if len(cache.layers) != len(weights.layers):
            raise ValueError(f"the cache has {len(cache.layers)} layers, the model {len(weights.layers)}")
        prefix, bank = embeddings, embeddings.new_zeros(embeddings.shape[0], 0, embeddings.shape[1])
        states: list[LayerState] = []
        recorded: list[LayerOutput] = []
        output_probs: list[Tensor] = []
        for index, layer in enumerate(weights.layers):
            out = decoder_layer(index, prefix, bank, cache.layers[index], layer, text, record=record)
            prefix, bank = out.prefix, out.bank
            states.append(out.state)
            if record:
                recorded.append(out)
        hidden = mix(bank, prefix, weights.output_mix, text, output_probs if record else None)
        normed = rms_norm(hidden[-1:] if last_only else hidden, weights.norm, text.rms_norm_eps)
        logits = linear(normed, weights.lm_head)
        # Only now: an error above leaves the cache at the last good token.
        cache.layers, cache.num_tokens = states, cache.num_tokens + embeddings.shape[0]
        return Output(
            logits if self.dtype == torch.float64 else logits.float(),
            hidden,
            prefix,
            bank,
            tuple(recorded),
            [probabilities for out in recorded for probabilities in out.mix_probs] + output_probs,
        )

    def step(self, input_ids: Ids, cache: Cache) -> Tensor:
        """Logits [T, vocab] of the next text tokens of a sequence; the cache is advanced."""
        return self.forward(self.embed(input_ids), cache).logits

    @torch.inference_mode()
    def run_layer(self, index: int, prefix: Tensor, bank: Tensor, state: LayerState | None = None) -> LayerOutput:
        """Layer `index` alone (0-based), for comparisons without error build-up.

        prefix [T, H] before the layer; bank [T, n, H], n = `Schedule.attn_blocks(index)` blocks written before it;
        state: of earlier tokens, None for a new sequence. Inputs are cast to the model's dtype.
        """
        if state is None:
            state = self.new_cache().layers[index]
        prefix, bank = (tensor.to(self.device, self.dtype) for tensor in (prefix, bank))
        return decoder_layer(index, prefix, bank, state, self.weights.layers[index], self.config.text, record=True)

    def _checked_ids(self, input_ids: Ids) -> Tensor:
        ids = torch.as_tensor(input_ids)
        if ids.ndim != 1 or ids.numel() == 0 or ids.is_floating_point():
            raise ValueError(
                f"input_ids must be a non-empty list of token ids, got shape {list(ids.shape)} {ids.dtype}"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.text.vocab_size:
            raise ValueError(
                f"input_ids hold {low}..{high}; the vocabulary has ids 0..{self.config.text.vocab_size - 1}"
            )
        return ids.long().to(self.device)


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    packed_experts: bool = False,
) -> ReferenceK3:
    """Load a checkpoint folder in the released layout, Kimi K3 or Kimi-Linear.

    dtype: float64, float32 or bfloat16; tensors stored F32 stay at least F32. packed_experts keeps the MXFP4 bytes of
    the routed experts and unpacks an expert when it is used. Raises ConfigError, CheckpointError or UnsupportedError
    before or while reading.
    """
    path = Path(path)
    config = load_config(path)
    weights = read_weights(path, config, dtype, torch.device(device), packed_experts)
    return ReferenceK3(config, weights, path)
