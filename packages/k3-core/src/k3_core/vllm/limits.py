"""What the reference model does not serve, refused in seconds: before weights load, in one message each.

vLLM calls :class:`ReferenceHook` while it settles its configuration, in the process the user started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from k3_core import checkpoint
from k3_core.config import K3Config, load_config
from k3_core.errors import UnsupportedError
from k3_core.vllm import compat
from k3_core.vllm.layers.cache import latent_width

logger = logging.getLogger("vllm.plugins.k3")

DTYPES = (torch.float32, torch.bfloat16)


class ReferenceHook:
    """vLLM's configuration hook for the reference model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Check ``config.json`` and take over what vLLM would otherwise decide by the model's family.

        Raises ConfigError for a configuration that cannot be Kimi K3, UnsupportedError for an unsupported option.
        """
        config = load_config(compat.released_config(model_config))
        if model_config.quantization is not None:
            raise UnsupportedError(
                f"--quantization {model_config.quantization}: leave it out; the checkpoint says how experts are stored"
            )
        compat.own_quantization(model_config)
        compat.own_latent_attention(model_config, latent_width(config.text))
        kinds = [config.text.layer_kind(i) for i in range(config.text.num_hidden_layers)]
        compat.name_layer_kinds(model_config, ["linear_attention" if kind == "kda" else "attention" for kind in kinds])
        if model_config.tokenizer_mode == "auto":
            if _has_k3_vocabulary(config):
                model_config.tokenizer_mode = "kimi_k3"
            elif not (model_config.trust_remote_code or model_config.skip_tokenizer_init):
                logger.warning(
                    "Kimi-Linear's tokenizer and chat format are remote code; without --trust-remote-code transformers "
                    "reads tiktoken.model with its own split pattern: ids may differ, and there is no chat template"
                )

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what cannot work, check the shards' headers, and skip vLLM's warm-up.

        Raises UnsupportedError with all reasons, CheckpointError for the first damaged shard.
        """
        reasons = [*not_now(vllm_config), *reference_only(vllm_config)]
        if reasons:
            raise UnsupportedError("the Kimi K3 reference model cannot serve this: " + "; ".join(reasons))
        compat.no_compilation(vllm_config)
        multimodal = vllm_config.model_config.multimodal_config
        if multimodal is not None:
            # The largest image has 67,000 patches; attention over them takes minutes on a CPU and measures nothing.
            multimodal.skip_mm_profiling = True
        verify_headers(vllm_config)


def not_now(vllm_config: Any, draftless: Sequence[str] = ()) -> Iterator[str]:
    """What no wheel of this project serves yet, by name.

    draftless: speculative methods without a draft model that the caller does serve.
    """
    speculative = vllm_config.speculative_config
    if vllm_config.lora_config is not None:
        yield "LoRA adapters are not supported; leave out --enable-lora"
    if speculative is not None and speculative.method not in draftless:
        instead = f"use one of {', '.join(draftless)} or leave out" if draftless else "leave out"
        yield (
            f"draft models are not supported (speculative method {speculative.method!r}); "
            f"{instead} --speculative-config"
        )
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        yield "micro-batches (dual batch overlap) are not supported; leave out --enable-dbo and --ubatch-size"
    if vllm_config.kv_transfer_config is not None:
        yield "KV transfer (prefill/decode disaggregation, KV offload) is not supported; leave out --kv-transfer-config"
    if getattr(vllm_config.cache_config, "kv_offloading_size", None):
        yield "KV offload is not supported; leave out --kv-offloading-size"
    if compat.offloads_weights(vllm_config):
        yield "weight offload is not supported; leave out --cpu-offload-gb and --offload-group-size"
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is not None and multimodal.mm_processor_kwargs:
        yield "preprocessor_config.json fixes how images are processed; leave out --mm-processor-kwargs"
    if multimodal is not None and multimodal.enable_mm_embeds:
        yield "precomputed image embeddings are not supported; leave out --enable-mm-embeds"


def reference_only(vllm_config: Any) -> Iterator[str]:
    """What the reference model alone does not do."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if model.dtype not in DTYPES:
        yield f"dtype {model.dtype} is not supported; use --dtype float32 or --dtype bfloat16"
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"it runs on one rank; set --{name.replace('_', '-')} 1"
    if getattr(parallel, "enable_expert_parallel", False):
        yield "it runs on one rank; leave out --enable-expert-parallel"
    if str(cache.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype {cache.cache_dtype} is not supported; leave it at auto"
    if cache.mamba_cache_mode == "all":
        yield "--mamba-cache-mode all is not supported; use align"
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32", "bfloat16"):
        yield f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype} is not supported; use float32 or bfloat16"
    if str(getattr(vllm_config.load_config, "load_format", "auto")) == "dummy":
        yield "--load-format dummy gives packed experts random NaN scales; write a random checkpoint with `k3 tiny`"
    if cache.enable_prefix_caching and not compat.can_copy_states_on_cpu():
        yield "prefix caching of recurrent states needs vLLM 0.26 or later on a CPU; pass --no-enable-prefix-caching"


def verify_headers(vllm_config: Any) -> None:
    """Compare the headers of all shards of a local checkpoint with the configuration, without reading a tensor.

    Raises CheckpointError naming the first shard or tensor at fault. A checkpoint that is not a local folder is checked
    while it loads.
    """
    folder = Path(vllm_config.model_config.model)
    if not folder.is_dir():
        return
    verify_folder(folder, load_config(compat.released_config(vllm_config.model_config)))


def verify_folder(folder: Path, config: K3Config) -> None:
    """Compare a folder's headers with ``config``; what is odd but harmless is logged. Raises CheckpointError."""
    for warning in checkpoint.verify_headers(folder, config).warnings:
        logger.warning("%s: %s", folder, warning)


def _has_k3_vocabulary(config: K3Config) -> bool:
    """Kimi-Linear's own releases use another vocabulary and chat format."""
    return not config.is_kimi_linear
