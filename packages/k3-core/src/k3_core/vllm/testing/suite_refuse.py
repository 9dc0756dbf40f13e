"""What a vendor cannot serve is refused while vLLM settles its configuration: in seconds, by name, in one message."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3_core.vllm import limits as core_limits
from k3_core.vllm.serving import limits
from k3_core.vllm.testing.suite_ranks import VendorSuite
from k3_core.vllm.testing.vendor import settle

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads not divisible": ({"tensor_parallel_size": 3}, "tensor parallel size 3 does not divide"),
    "float16": ({"dtype": "float16"}, "dtype float16"),
    "LoRA": ({"enable_lora": True}, "LoRA"),
    "KV transfer": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "disaggregation",
    ),
    "quantization": ({"quantization": "fp8"}, "--quantization fp8"),
    "recurrent state dtype": ({"mamba_ssm_cache_dtype": "float16"}, "--mamba-ssm-cache-dtype float16"),
    "a setting that nothing reads": ({"additional_config": {"k3_reduction": "merged"}}, "k3_reduction is not"),
    "an unknown reduction": ({"additional_config": {"k3_moe_reduction": "best"}}, "'best' is unknown"),
    "a reduction of one rank": ({"additional_config": {"k3_moe_reduction": "merged"}}, "one rank has nothing to sum"),
    "speculation beside prefix caching on a CPU": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "--no-enable-prefix-caching",
    ),
}

#: Seconds from the beginning of vLLM's validation to the message; what vLLM itself imports before is not in it.
LIMIT = 5.0

OFFLOAD = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0))


def fake(**changes: Any) -> Any:
    """vLLM's configuration as far as the rules read it."""
    values: dict[str, Any] = {
        "model.dtype": torch.bfloat16,
        "model.multimodal_config": None,
        "cache.mamba_cache_mode": "align",
        "cache.mamba_cache_dtype": "auto",
        "cache.mamba_ssm_cache_dtype": "auto",
        "cache.cache_dtype": "auto",
        "cache.use_replayssm": False,
        "parallel.data_parallel_size": 1,
        "speculative": None,
    } | changes
    part = {
        name: SimpleNamespace(**{k.split(".")[1]: v for k, v in values.items() if k.startswith(f"{name}.")})
        for name in ("model", "cache", "parallel")
    }
    return SimpleNamespace(
        model_config=part["model"],
        cache_config=part["cache"],
        parallel_config=part["parallel"],
        speculative_config=values["speculative"],
        lora_config=None,
        kv_transfer_config=None,
        offload_config=OFFLOAD,
    )


DRAFT = SimpleNamespace(method="mtp")
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "replay without speculation": ({"cache.use_replayssm": True}, "needs speculation"),
    "replay with speculation": ({"cache.use_replayssm": True, "speculative": DRAFT}, "one state slot a token"),
    "draft model": ({"speculative": DRAFT}, "draft models are not supported"),
    "data parallel": ({"parallel.data_parallel_size": 2}, "data parallelism"),
    "context parallel": ({"parallel.decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
    "load balancing": ({"parallel.enable_eplb": True}, "--enable-eplb"),
    "cache mode": ({"cache.mamba_cache_mode": "all"}, "use align"),
    "window dtype": ({"cache.mamba_cache_dtype": "float32"}, "--mamba-cache-dtype float32"),
    "fp32 on a GPU": ({"model.dtype": torch.float32}, "use --dtype bfloat16"),
    "fp16 on a GPU": ({"model.dtype": torch.float16}, "use --dtype bfloat16"),
}


@pytest.mark.serve
class RefuseSuite(VendorSuite):
    """The rules that all vendors share, through vLLM's own configuration and by themselves."""

    @pytest.fixture(scope="class")
    @classmethod
    def validated(cls, tiny: Path) -> Path:
        """A checkpoint whose configuration vLLM has settled once: its imports are done."""
        settle(tiny)
        return tiny

    @pytest.mark.parametrize("what", REFUSED)
    def test_an_option_is_refused_by_name_within_five_seconds(self, what: str, validated: Path) -> None:
        options, words = REFUSED[what]
        took: list[float] = []
        # vLLM may inspect the model in a process of its own; on a busy machine the quicker of two attempts counts.
        while not took or (took[-1] >= LIMIT and len(took) < 2):
            started = time.monotonic()
            with pytest.raises(ValueError, match="(?s).*" + words) as caught:
                settle(validated, **options)
            took.append(time.monotonic() - started)
        assert min(took) < LIMIT
        assert str(caught.value).count(words) == 1
        assert str(caught.value).count("cannot serve this") <= 1

    def test_an_intact_checkpoint_is_accepted(self, tiny: Path) -> None:
        config = settle(tiny)
        assert config.model_config.quantization is None
        assert config.model_config.tokenizer_mode == "kimi_k3"

    def test_speculation_without_a_draft_model_is_accepted(self, tiny: Path) -> None:
        drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
        config = settle(tiny, speculative_config=drafts, enable_prefix_caching=False)
        assert config.num_speculative_tokens == 2

    @pytest.mark.parametrize("what", RULES)
    def test_what_a_gpu_cannot_serve_is_refused(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        changes, words = RULES[what]
        monkeypatch.setattr(limits, "on_cpu", lambda: False)
        config = fake(**changes)
        reasons = [*core_limits.not_now(config, limits.DRAFTLESS), *limits.cannot_work(config)]
        assert sum(words in reason for reason in reasons) == 1

    def test_a_plain_configuration_is_not_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "on_cpu", lambda: False)
        assert [*core_limits.not_now(fake(), limits.DRAFTLESS), *limits.cannot_work(fake())] == []

    def test_every_divisor_of_the_released_heads_is_accepted(self) -> None:
        from k3_core.checkpoint import tiny_config
        from k3_core.errors import ConfigError

        linear = {"num_heads": 96, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
        lists = {"kda_layers": [1, 2, 3], "full_attn_layers": [4, 5], "use_full_rank_gate": True}
        config = tiny_config(
            "k3",
            num_attention_heads=96,
            num_key_value_heads=96,
            moe_intermediate_size=3072,
            intermediate_size=33792,
            linear_attn_config=linear | lists,
        )
        for size in range(1, 97):
            parallel = SimpleNamespace(tensor_parallel_size=size, enable_expert_parallel=False)
            if 96 % size == 0 and 3072 // size % 32 == 0:
                limits.check_topology(config, parallel)
            else:
                with pytest.raises(ConfigError, match=str(size)):
                    limits.check_topology(config, parallel)
