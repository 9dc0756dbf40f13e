"""Input embeddings: text rows, image features in place of the pads.

    e_t = E[id_t]                              text only: every row as it is
    with images: e_t = 0 where id_t is pad_token_id, then the features of image m, in order, at its media pads

The zeroing happens in the multimodal forward of the released code and not in the text-only one.
"""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from k3_core.config import K3Config
from k3_core.contracts import vision
from k3_core.errors import ImageError, UnsupportedError
from k3_core.multimodal import ImageSettings, expand_pads, preprocess_image
from k3_core.reference.weights import ModelWeights


def encode_images(
    images: Sequence[Image.Image], weights: ModelWeights, settings: ImageSettings
) -> tuple[Tensor, list[int]]:
    """(features [L, H] of all images one after the other, tokens of each). Raises ImageError, UnsupportedError."""
    if weights.tower is None or weights.projector is None:
        raise UnsupportedError("images were given, but this model has no vision tower")
    prepared = [preprocess_image(image, settings) for image in images]
    device = weights.tower.patch_proj.device
    pixels = torch.cat([pixel_values for pixel_values, _ in prepared]).to(device)
    grids = torch.tensor([grid for _, grid in prepared])
    merged = vision.tower(pixels, grids, weights.tower)
    return vision.projector(merged, weights.projector), [t * h * w // 4 for t, h, w in grids.tolist()]


def embed_text(input_ids: Tensor, weights: ModelWeights) -> Tensor:
    """Rows of the embedding: input_ids [T] -> [T, H]."""
    return weights.embed[input_ids]


def embed_with_images(
    input_ids: Tensor, images: Sequence[Image.Image], weights: ModelWeights, config: K3Config, settings: ImageSettings
) -> Tensor:
    """Embeddings of ids that hold one media pad an image, expanded to one row a token: [T expanded, H].

    Raises ImageError where pads and images differ in number or an image is unusable.
    """
    pad = config.media_placeholder_token_id
    if pad is None:
        raise UnsupportedError("images were given, but the configuration has no media_placeholder_token_id")
    present = int((input_ids == pad).sum())
    if present != len(images):
        raise ImageError(f"the prompt holds {present} image pad tokens (id {pad}) but {len(images)} images were given")
    features, counts = encode_images(images, weights, settings)
    expanded = torch.tensor(expand_pads(input_ids.tolist(), counts, pad), device=weights.embed.device)
    embeddings = embed_text(expanded, weights)
    if config.pad_token_id is not None:
        embeddings[expanded == config.pad_token_id] = 0
    embeddings[expanded == pad] = features.to(embeddings.dtype)
    return embeddings
