"""What becomes of weights: every place is filled, routing values stay fp32, no expert waits long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from k3_core.checkpoint import CheckpointReader
from k3_core.vllm.serving.experts import RoutedExperts
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.outer import load as load_weights
from k3_core.vllm.testing.ranks import Group, build, fill, groups
from k3_core.vllm.testing.suite_ranks import VendorSuite
from k3_core.vllm.testing.vendor import Vendor, settle

MOE = "language_model.model.layers.{}.block_sparse_moe"


def load(
    vendor: Vendor, folder: Path, size: int = 1, rank: int = 0, dtype: str = "bfloat16", expert_parallel: bool = False
) -> Any:
    """A loaded text model of one of ``size`` ranks."""
    with groups(Group(size, rank), Group()):
        config = settle(folder, dtype=dtype)
        config.parallel_config.tensor_parallel_size = size
        config.parallel_config.enable_expert_parallel = expert_parallel
        model = build(vendor, config, CheckpointReader(folder).config)
        fill(model)
    return model


class LoadSuite(VendorSuite):
    """Weights of the tiny Kimi K3."""

    def test_no_more_than_one_expert_waits_for_its_other_tensors(
        self, tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting: list[int] = []
        honest = RoutedExperts.put

        def counted(experts: RoutedExperts, *args: Any) -> None:
            honest(experts, *args)
            waiting.append(len(experts._pending))

        monkeypatch.setattr(RoutedExperts, "put", counted)
        load(self.vendor, tiny)
        assert max(waiting) == 1
        assert waiting[-1] == 0

    def test_values_that_routing_and_states_depend_on_stay_fp32(self, tiny: Path) -> None:
        """A bias of 1 + 2^-12 does not survive bfloat16; neither would gates and convolutions."""
        model, reader = load(self.vendor, tiny), CheckpointReader(tiny)
        router = model.model.layers[1].feed_forward.gate
        bias = reader.read(f"{MOE.format(1)}.gate.e_score_correction_bias")
        assert router.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(router.e_score_correction_bias, bias)
        assert not torch.equal(bias, bias.bfloat16().float()), "the bias would survive bfloat16: the test shows nothing"
        kda = next(m for m in model.modules() if isinstance(m, KdaLayer))
        for name, parameter in kda.named_parameters():
            if name in ("A_log", "dt_bias", "conv_weight", "o_norm_weight"):
                assert parameter.dtype == torch.float32, name
        stored = reader.read("language_model.model.layers.0.self_attn.k_conv1d.weight")
        assert torch.equal(kda.conv_weight[kda.width : 2 * kda.width], stored.squeeze(1))

    def test_no_parameter_is_left_as_it_was_allocated(self, tiny: Path) -> None:
        with groups(Group(), Group()):
            config = settle(tiny, dtype="float32")
            model = build(self.vendor, config, CheckpointReader(tiny).config)
            for _, parameter in model.named_parameters():
                parameter.data.fill_(float("nan"))
            for layer in model.model.layers:  # rows of padding, which no tensor fills
                layer.self_attn.in_proj.weight.data[layer.self_attn.rows.total :] = 0
            load_weights(model, model, iter(()), {})
        assert not [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
