"""The vision tower and the projector: weights named as in the checkpoint, arithmetic in ``contracts.vision``."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from k3_core.config import VisionConfig
from k3_core.contracts import vision
from k3_core.vllm.layers.weights import Weight


class _PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Weight(config.vt_hidden_size, 3, config.patch_size, config.patch_size)
        self.pos_emb = Weight(config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size)


class _Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = Weight(config.vt_intermediate_size, config.vt_hidden_size)
        self.fc1 = Weight(config.vt_hidden_size, config.vt_intermediate_size)


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden = config.vt_hidden_size
        self.norm0, self.norm1 = Weight(hidden), Weight(hidden)
        self.wqkv = Weight(3 * config.qkv_hidden_size, hidden)
        self.wo = Weight(hidden, config.qkv_hidden_size)
        self.mlp = _Mlp(config)

    def weights(self) -> vision.BlockWeights:
        return vision.BlockWeights(
            norm0=self.norm0.weight,
            wqkv=self.wqkv.weight,
            wo=self.wo.weight,
            norm1=self.norm1.weight,
            fc0=self.mlp.fc0.weight,
            fc1=self.mlp.fc1.weight,
        )


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = Weight(config.vt_hidden_size)


class VisionTower(nn.Module):
    """MoonViT-V2."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = _PatchEmbed(config)
        self.encoder = _Encoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Patches [P, 3, 14, 14] of all items with grids [M, 3] -> merged features [L, 4, H]."""
        weights = vision.TowerWeights(
            patch_proj=self.patch_embed.proj.weight,
            pos_emb=self.patch_embed.pos_emb.weight,
            blocks=[cast(_Block, block).weights() for block in self.encoder.blocks],
            final_layernorm=self.encoder.final_layernorm.weight,
            num_heads=self.config.vt_num_attention_heads,
        )
        return vision.tower(pixel_values, grid_thws, weights, self.config.norm_eps)


class Projector(nn.Module):
    """Merged features to token embeddings."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged = config.merged_size
        # The released names are proj.0 and proj.2: between them stands the activation.
        self.proj = nn.ModuleDict({"0": Weight(merged, merged), "2": Weight(config.text_hidden_size, merged)})
        self.post_norm = Weight(config.text_hidden_size)
        self.eps = config.projector_ln_eps

    def forward(self, merged: Tensor) -> Tensor:
        """[L, 4, H] -> [L, text H]."""
        weights = vision.ProjectorWeights(
            linear_1=cast(Weight, self.proj["0"]).weight,
            linear_2=cast(Weight, self.proj["2"]).weight,
            post_norm=self.post_norm.weight,
            eps=self.eps,
        )
        return vision.projector(merged, weights)
