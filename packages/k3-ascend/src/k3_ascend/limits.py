"""What this wheel does not serve beyond what none does, and what it settles for vllm-ascend, before weights load."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from k3_ascend import experts, modelslim, versions
from k3_ascend.generation import Generation
from k3_core.checkpoint import Topology, expert_width
from k3_core.config import K3Config
from k3_core.errors import ConfigError, UnsupportedError
from k3_core.vllm.serving.cache import state_dtypes, state_shapes
from k3_core.vllm.serving.limits import ServingHook, on_cpu

logger = logging.getLogger("vllm.plugins.k3")

#: The block sizes of vllm-ascend's MLA backend are multiples of this.
KERNEL_BLOCK = 128
#: Rows of one request that the MLA backend verifies at most.
MOST_QUERIES = 16


class AscendHook(ServingHook):
    """vLLM's configuration hook for this wheel's models."""

    wheel = "k3-ascend"
    settings = ("k3_experts",)

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        """As the base class does. Raises UnsupportedError where vLLM has no NPU platform."""
        if on_cpu():
            raise UnsupportedError(
                "k3-ascend's model is made of vllm-ascend's layers and runs on NPUs; on a CPU serve with "
                "K3_IMPL=reference (k3-core)"
            )
        if model_config.quantization == "ascend" and modelslim.description(model_config.model, model_config.revision):
            model_config.quantization = None  # what vllm-ascend calls ModelSlim; it finds the description by itself
        super().verify_and_update_model_config(model_config)

    @classmethod
    def device_reasons(cls, vllm_config: Any, config: K3Config) -> Iterator[str]:
        """Versions, paths and settings of vllm-ascend that do not fit this model."""
        from k3_ascend import dispatch

        mismatch = versions.mismatch()
        if mismatch:
            yield mismatch
        yield from _setting_reasons(vllm_config)
        yield from _page_reasons(vllm_config, config)
        found = modelslim.of_model(vllm_config.model_config, config)
        if found is not None:
            yield from modelslim.reasons(
                found, config, _topology(vllm_config), _wanted_form(vllm_config), dispatch.generation()
            )
            logger.info("Kimi K3: int4 experts as ModelSlim stored them (%s)", found)
            return
        try:
            form = _expert_form(vllm_config, config, dispatch.generation())
        except ConfigError as error:
            yield str(error)
        else:
            logger.info("Kimi K3: routed experts as %s on %s", form, dispatch.generation().value)

    @classmethod
    def verify_folder(cls, folder: Path, config: K3Config) -> None:
        """Headers, also those of a ModelSlim checkpoint. Raises CheckpointError for the first fault."""
        found = modelslim.of_checkpoint(str(folder), None, config)
        if found is None:
            super().verify_folder(folder, config)
        else:
            modelslim.verify(folder, config, found)

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """See :meth:`ServingHook.verify_and_update_config`; then settle how graphs are captured."""
        super().verify_and_update_config(vllm_config)
        settle_graphs(vllm_config)


def _setting_reasons(vllm_config: Any) -> Iterator[str]:
    extra = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    if _on(extra.get("enable_fused_mc2")) or _on(os.environ.get("VLLM_ASCEND_ENABLE_FUSED_MC2")):
        yield "enable_fused_mc2 computes SwiGLU inside its operator, K3's experts use SiTU; set it to 0"
    if _sequence_parallel(vllm_config):
        yield "sequence parallelism (VLLM_ASCEND_ENABLE_FLASHCOMM1, enable_sp) is not supported; switch it off"
    if extra.get("multistream_overlap_gate") or extra.get("multistream_overlap_shared_expert"):
        yield "multistream overlap belongs to vllm-ascend's own expert layer, which is not used; leave it out"
    if extra.get("enable_shared_expert_dp"):
        yield "enable_shared_expert_dp is not supported; leave it out"
    xlite = extra.get("xlite_graph_config")
    if xlite.get("enabled") if isinstance(xlite, dict) else _on(xlite):
        yield "xlite graphs are not supported; leave out xlite_graph_config"
    if extra.get("finegrained_tp_config"):
        yield "finegrained_tp_config is not supported; leave it out"
    if vllm_config.num_speculative_tokens + 1 > MOST_QUERIES:
        yield f"vllm-ascend's MLA verifies at most {MOST_QUERIES - 1} draft tokens; lower num_speculative_tokens"
    cache = vllm_config.cache_config
    if str(cache.cache_dtype) not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype {cache.cache_dtype}: latent rows are cached in the model's dtype; leave it at auto"
    block = cache.block_size if getattr(cache, "user_specified_block_size", False) else None
    if block is not None and block % KERNEL_BLOCK:
        yield f"--block-size {block} is not a multiple of {KERNEL_BLOCK}, which vllm-ascend's MLA needs; leave it out"


def _page_reasons(vllm_config: Any, config: K3Config) -> Iterator[str]:
    """vllm-ascend 0.23 needs the recurrent state of a request to fill whole kernel blocks of latent rows."""
    text, size = config.text, vllm_config.parallel_config.tensor_parallel_size
    _, shape = state_shapes(text, size, 0)
    state = prod(shape) * state_dtypes(vllm_config)[1].itemsize
    block = KERNEL_BLOCK * text.kv_lora_rank * vllm_config.model_config.dtype.itemsize
    if state % block:
        yield (
            f"a rank's recurrent state of {state} bytes is not a multiple of {block} bytes of latent rows, which "
            f"vllm-ascend 0.23 needs; use fewer ranks than --tensor-parallel-size {size}, or fp32 states"
        )


def _expert_form(vllm_config: Any, config: K3Config, generation: Generation) -> str:
    """The form of the routed experts' weights. Raises ConfigError for one that cannot be used."""
    topology = _topology(vllm_config)
    width, _ = expert_width(config, topology.tp_size, topology.ep_size)
    want = _wanted_form(vllm_config)
    return experts.choose(want, config.quantization is not None, generation, (config.text.expert_hidden_size, width))


def _topology(vllm_config: Any) -> Topology:
    size = vllm_config.parallel_config.tensor_parallel_size
    expert_parallel = vllm_config.parallel_config.enable_expert_parallel and size > 1
    return Topology(tp_size=size, ep_size=size if expert_parallel else 1, vision_data_parallel=True)


def _wanted_form(vllm_config: Any) -> str | None:
    extra = vllm_config.additional_config
    return extra.get("k3_experts") if isinstance(extra, dict) else None


def _sequence_parallel(vllm_config: Any) -> bool:
    from vllm_ascend import envs

    passes = vllm_config.compilation_config.pass_config
    return bool(getattr(passes, "enable_sp", False)) or bool(getattr(envs, "VLLM_ASCEND_ENABLE_FLASHCOMM1", False))


def _on(value: Any) -> bool:
    """Whether a switch is set, by a user's number, boolean or word; a word that is no "off" counts as "on"."""
    return str(value if value is not None else 0).strip().lower() not in ("", "0", "false", "off", "no", "none")


def settle_graphs(vllm_config: Any) -> None:
    """Decode steps are captured whole, other steps run eagerly; nothing is traced by a compiler.

    Without Triton kernels the contracts serve, which read sizes back to the host and cannot be captured: then all
    steps run eagerly, and the log says so.
    """
    from vllm.config import CompilationMode
    from vllm.config.compilation import CUDAGraphMode

    from k3_ascend import dispatch

    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.NONE
    if vllm_config.model_config.enforce_eager:
        return
    ready, why = dispatch.triton_ready()
    if ready:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        return
    logger.warning("Kimi K3: no ACL graphs, all steps run eagerly: %s", why)
    vllm_config.model_config.enforce_eager = True
    compilation.cudagraph_mode = CUDAGraphMode.NONE
