"""What a vendor's model does not serve, refused in seconds: before weights load, in one message that says what to do.

vLLM calls a vendor's subclass of :class:`ServingHook` while it settles its configuration, in the process the user
started. What no wheel of this project serves is in :func:`k3_core.vllm.limits.not_now`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from k3_core import checkpoint
from k3_core.config import K3Config, load_config
from k3_core.errors import ConfigError, UnsupportedError
from k3_core.vllm import compat
from k3_core.vllm.layers.cache import latent_width
from k3_core.vllm.limits import not_now, verify_folder
from k3_core.vllm.serving import isolation

#: Speculation without a draft model: proposals come from the text itself.
DRAFTLESS = ("ngram", "suffix")


class ServingHook:
    """vLLM's configuration hook of a vendor's models.

    Attributes:
        wheel: distribution name, for messages.
        settings: this project's keys of ``--additional-config`` that the vendor's model reads.
        isolates: whether requests with logits that are not finite are ended (:mod:`k3_core.vllm.serving.isolation`).
    """

    wheel: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("k3_moe_reduction",)
    isolates: ClassVar[bool] = False

    @classmethod
    def device_reasons(cls, vllm_config: Any, config: K3Config) -> Iterator[str]:
        """Why this device (not a CPU) cannot serve the configuration; the vendor's own."""
        yield from ()

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        """Check ``config.json`` and take over what vLLM would otherwise decide by the model's family.

        Raises ConfigError for a configuration that cannot be Kimi K3, UnsupportedError for an unsupported option.
        """
        config = load_config(compat.released_config(model_config))
        if model_config.quantization is not None:
            raise UnsupportedError(
                f"--quantization {model_config.quantization}: leave it out; the checkpoint says how experts are stored"
            )
        # The routed experts are read and multiplied here; every other matrix is stored plain (K3-SPEC 1.3).
        compat.own_quantization(model_config)
        if on_cpu():
            compat.own_latent_attention(model_config, latent_width(config.text))
        if model_config.tokenizer_mode == "auto" and not config.is_kimi_linear:
            model_config.tokenizer_mode = "kimi_k3"

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what cannot work and check the shards' headers.

        Raises ConfigError for sizes that do not divide, UnsupportedError with all other reasons, CheckpointError for
        the first damaged shard.
        """
        config = load_config(compat.released_config(vllm_config.model_config))
        check_topology(config, vllm_config.parallel_config)
        reasons = [*not_now(vllm_config, DRAFTLESS), *cannot_work(vllm_config)]
        reasons += setting_reasons(vllm_config, config, cls.settings)
        if not on_cpu():
            reasons += cls.device_reasons(vllm_config, config)
        if reasons:
            raise UnsupportedError(f"{cls.wheel} cannot serve this: " + "; ".join(reasons))
        if on_cpu():
            compat.no_compilation(vllm_config)
            multimodal = vllm_config.model_config.multimodal_config
            if multimodal is not None:
                multimodal.skip_mm_profiling = True  # the largest image takes minutes on a CPU and measures nothing
        cls.verify_checkpoint(vllm_config, config)
        if cls.isolates:
            isolation.install(vllm_config)

    @classmethod
    def verify_checkpoint(cls, vllm_config: Any, config: K3Config) -> None:
        """Compare a local checkpoint's headers with the configuration. Raises CheckpointError for the first fault."""
        folder = Path(vllm_config.model_config.model)
        dummy = str(getattr(vllm_config.load_config, "load_format", "auto")) == "dummy"
        if folder.is_dir() and not dummy:
            cls.verify_folder(folder, config)

    @classmethod
    def verify_folder(cls, folder: Path, config: K3Config) -> None:
        """The comparison itself; the vendor's own where it reads other forms than the released one."""
        verify_folder(folder, config)


def check_topology(config: K3Config, parallel: Any) -> None:
    """Refuse parallel sizes that do not divide the model. Raises ConfigError naming the size and those that work."""
    size = parallel.tensor_parallel_size
    expert_parallel = bool(getattr(parallel, "enable_expert_parallel", False)) and size > 1
    checkpoint.check_topology(
        config, checkpoint.Topology(tp_size=size, ep_size=size if expert_parallel else 1, vision_data_parallel=True)
    )


def cannot_work(vllm_config: Any) -> Iterator[str]:
    """Settings that contradict this model, whatever the device."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtypes = (torch.float32, torch.bfloat16) if on_cpu() else (torch.bfloat16,)
    if model.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        yield f"dtype {str(model.dtype).removeprefix('torch.')} is not supported; use --dtype {names}"
    yield from _parallel_reasons(vllm_config.parallel_config)
    if cache.mamba_cache_mode == "all":
        yield "--mamba-cache-mode all is not supported; use align"
    if cache.mamba_cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield (
            f"--mamba-cache-dtype {cache.mamba_cache_dtype} is not supported: the convolution's window has the model's "
            "dtype; leave it at auto"
        )
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32", "bfloat16"):
        yield f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype} is not supported; use float32 or bfloat16"
    if getattr(cache, "use_replayssm", False) or getattr(cache, "use_kda_recoverssm", False):
        if vllm_config.speculative_config is None:
            yield "--use-replayssm replays drafted tokens and needs speculation, which is off; leave it out"
        else:
            yield "--use-replayssm is not supported: drafts are verified with one state slot a token; leave it out"
    if on_cpu() and str(cache.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype {cache.cache_dtype} is not supported on a CPU; leave it at auto"
    if on_cpu() and cache.enable_prefix_caching and vllm_config.speculative_config is not None:
        yield "prefix caching beside speculation needs vLLM's GPU kernels; on a CPU pass --no-enable-prefix-caching"


def setting_reasons(vllm_config: Any, config: K3Config, known: Sequence[str]) -> Iterator[str]:
    """Keys of ``--additional-config`` that nothing would read, and a reduction that the layers would refuse later."""
    from k3_core.vllm.serving import reductions

    extra = vllm_config.additional_config
    ours = [key for key in extra if str(key).startswith("k3_")] if isinstance(extra, dict) else []
    for key in ours:
        if key not in known:
            yield f"--additional-config {key} is not a setting of this wheel (it has {', '.join(known)}); leave it out"
        elif key == "k3_moe_reduction":
            try:
                reductions.choose(reductions.facts(config.text, vllm_config), extra[key])
            except ConfigError as error:
                yield f"--additional-config {key}: {error}"


def _parallel_reasons(parallel: Any) -> Iterator[str]:
    if parallel.data_parallel_size > 1:
        yield "data parallelism is not supported; start one server a replica and leave out --data-parallel-size"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"context parallelism is not supported; set --{name.replace('_', '-')} 1"
    if getattr(parallel, "enable_eplb", False):
        yield "expert load balancing is not supported; leave out --enable-eplb"


def on_cpu() -> bool:
    """Whether vLLM runs on a CPU, where contracts stand in for kernels."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
