"""The differences between the supported releases of vLLM, all of them in this module.

Each function says which releases differ and how. vLLM is imported inside the functions, so that importing this module
costs nothing and works beside any release.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3_core.errors import UnsupportedError

Undo = Callable[[], None]

# ---------------------------------------------------------------------------------------------------- registration


def register_model(architecture: str, target: str) -> Undo:
    """Let vLLM load ``architecture`` from ``target`` (``"module:Class"``), replacing an in-tree model of that name."""
    from vllm.model_executor.models import ModelRegistry

    undo = _replace(ModelRegistry.models, architecture)
    ModelRegistry.register_model(architecture, target)
    return undo


def register_config_hook(architecture: str, target: str | None, announce: Callable[[], None]) -> Undo:
    """Call ``target`` (``"module:Class"``) for models of ``architecture`` while vLLM settles its configuration.

    The map is vLLM's own extension point for architectures and has the same two methods from 0.23 to 0.33. ``announce``
    is called first, in the process that the user started.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class Hook(VerifyAndUpdateConfig):
        """Loads the wheel's hook on first use: registration stays cheap."""

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            announce()
            if target:
                _load(target).verify_and_update_model_config(model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if target:
                _load(target).verify_and_update_config(vllm_config)

    undo = _replace(MODELS_CONFIG_MAP, architecture)
    MODELS_CONFIG_MAP[architecture] = Hook
    return undo


def register_config_classes() -> Undo:
    """Give transformers our configuration classes where vLLM has none.

    0.27 and later know ``kimi_k3``, 0.23 and later ``kimi_linear``; vLLM's own class wins where it exists.
    """
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    missing = [name for name in ("kimi_linear", "kimi_k3") if name not in _CONFIG_REGISTRY]
    if missing:
        from transformers import AutoConfig

        from k3_core.vllm import config

        for name in missing:
            AutoConfig.register(name, config.CLASSES[name], exist_ok=True)
    return _nothing  # transformers offers no way back, and a known model type harms nobody


def register_tokenizer(mode: str, module: str, name: str) -> Undo:
    """Use ``module.name`` for ``--tokenizer-mode mode``; the registry's own method would warn about replacing."""
    from vllm.tokenizers.registry import TokenizerRegistry

    undo = _replace(TokenizerRegistry.tokenizers, mode)
    TokenizerRegistry.tokenizers[mode] = (module, name)
    return undo


def register_renderer(mode: str, module: str, name: str) -> Undo:
    """Use ``module.name`` to render chats in ``--tokenizer-mode mode``."""
    from vllm.renderers.registry import RENDERER_REGISTRY

    undo = _replace(RENDERER_REGISTRY.renderers, mode)
    RENDERER_REGISTRY.renderers[mode] = (module, name)
    return undo


def register_parsers() -> Undo:
    """Parse replies with our own parsers under ``--reasoning-parser kimi_k3`` and ``--tool-call-parser kimi_k3``."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from k3_core.vllm import compose

    module = "k3_core.vllm.parsers"
    undos = [
        compose.install(),
        _replace(ReasoningParserManager.lazy_parsers, "kimi_k3"),
        _replace(ToolParserManager.lazy_parsers, "kimi_k3"),
    ]
    for loaded in (ReasoningParserManager.reasoning_parsers, ToolParserManager.tool_parsers):
        undos.append(_replace(loaded, "kimi_k3"))
        loaded.pop("kimi_k3", None)
    ReasoningParserManager.register_lazy_module("kimi_k3", module, "KimiK3ReasoningParser")
    ToolParserManager.register_lazy_module("kimi_k3", module, "KimiK3ToolParser")

    def undo() -> None:
        for step in undos:
            step()

    return undo


def rewind_cpu_generators() -> None:
    """Let seeded requests have prompts of several chunks on a CPU, where vLLM 0.27 and 0.32 end the worker.

    vLLM samples a token behind every chunk, discards it, and sets the request's generator back by an offset, which CPU
    generators do not have. Here such a generator starts again from its seed: nothing sampled from it has been kept yet.
    (After a preemption something has; the request then goes on from its seed, valid but not as it would have gone on.)
    Called when the reference model is made, in the worker; does nothing elsewhere and the second time.
    """
    module = sys.modules.get("vllm.v1.worker.cpu_model_runner")
    runner = getattr(module, "CPUModelRunner", None)
    original = getattr(runner, "_bookkeeping_sync", None)
    if runner is None or original is None or getattr(runner, "rewinds_generators", False):
        return

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
        discarded = {row: generators.pop(row) for row in mask.nonzero()[0].tolist() if row in generators}
        for generator in discarded.values():
            generator.manual_seed(generator.initial_seed())
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(discarded)

    runner._bookkeeping_sync = bookkeeping
    runner.rewinds_generators = True


def _replace(table: dict[str, Any], key: str) -> Undo:
    """An undo that restores ``table[key]``, or its absence."""
    if key in table:
        before = table[key]
        return lambda: table.__setitem__(key, before)
    return lambda: table.pop(key, None) and None


def _nothing() -> None:
    """An undo for a step that cannot or need not be undone."""


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


# --------------------------------------------------------------------------------------------------- configuration


def released_config(model_config: Any) -> dict[str, Any]:
    """The checkpoint's ``config.json`` as released, with the user's ``--hf-overrides`` applied.

    vLLM's configuration object is not used: the classes of different releases add and rename keys.
    """
    raw = repository_json(model_config, "config.json")
    overrides = getattr(model_config, "hf_overrides", None)
    return _merged(raw, overrides) if isinstance(overrides, Mapping) else dict(raw)


def repository_json(model_config: Any, file: str) -> dict[str, Any]:
    """A JSON file of the checkpoint, local or on the hub. Raises ConfigError where there is none."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    from k3_core.errors import ConfigError

    try:
        raw = get_hf_file_to_dict(file, model_config.model, model_config.revision)
    except (ValueError, RecursionError) as error:  # not JSON, nested too deeply
        raise ConfigError(f"{model_config.model}/{file}: not valid JSON ({error})") from error
    if raw is None:
        raise ConfigError(f"{model_config.model}: no {file} found; Kimi K3 needs it")
    return dict(raw)


def checkpoint_folder(model_config: Any) -> Path:
    """The local folder of the checkpoint; for a name on the hub the folder it was fetched to (``--download-dir``).

    vLLM says where while it loads a model, which is when this is called.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    cache = None if current is None else current.load_config.download_dir
    return Path(
        snapshot_download(model_config.model, revision=model_config.revision, cache_dir=cache, local_files_only=True)
    )


def _merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def own_latent_attention(model_config: Any, width: int) -> None:
    """Tell vLLM that this model brings its own latent attention, with cache rows of ``width`` values.

    vLLM takes ``model_type: kimi_linear`` for its MLA and then, on a CPU, switches chunked prefill and prefix caching
    off and forces 16-token blocks, for a kernel that is not used here. ``VLLM_MLA_DISABLE=1`` would prevent that for
    every model of the process; this does it for the one model. Same fields from 0.23 to 0.33.
    """
    sizes = model_config.model_arch_config
    sizes.is_deepseek_mla = False
    sizes.head_size, sizes.total_num_kv_heads = width, 1
    if model_config.use_mla:
        raise RuntimeError("this release of vLLM decides about MLA elsewhere; set VLLM_MLA_DISABLE=1")


def name_layer_kinds(model_config: Any, kinds: list[str]) -> None:
    """Name the layers' kinds ("linear_attention", "attention"); vLLM 0.23 counts them by name on a CPU."""
    model_config.hf_text_config.layers_block_type = kinds


def own_quantization(model_config: Any) -> None:
    """Hide the checkpoint's quantisation from vLLM: the reference reads packed experts itself.

    Otherwise vLLM would look for kernels of ``compressed-tensors``, and refuse or convert.
    """
    for config in (model_config.hf_config, model_config.hf_text_config, model_config.model_arch_config):
        if getattr(config, "quantization_config", None) is not None:
            config.quantization_config = None


def offloads_weights(vllm_config: Any) -> bool:
    """Whether weights are to be kept off the device: fields of ``offload_config``, in all supported releases."""
    offload = vllm_config.offload_config
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)


def no_compilation(vllm_config: Any) -> None:
    """Skip vLLM's warm-up for compiled models; the reference is plain PyTorch and is not compiled."""
    from vllm.config import CompilationMode

    vllm_config.compilation_config.mode = CompilationMode.NONE


def can_copy_states_on_cpu() -> bool:
    """Whether this release can copy recurrent states between cache blocks on a CPU (0.23 has only a Triton kernel)."""
    from vllm.utils import cpu_triton_utils

    return any("batch_memcpy" in name for name in dir(cpu_triton_utils))


# ---------------------------------------------------------------------------------------------- chats and images


def chat_utils() -> Any:
    """The module with ``parse_chat_messages``; it moved between 0.27 and 0.32."""
    try:
        return importlib.import_module("vllm.renderers.chat_utils")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.entrypoints.chat_utils")


class ProcessorCall(NamedTuple):
    """What vLLM hands to ``_call_hf_processor``."""

    text: str | None
    images: list[Any]
    options: dict[str, Any]


#: Options that vLLM's own code adds and that concern text only.
_TEXT_OPTIONS = ("truncation", "add_special_tokens", "max_length", "padding")


def processor_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ProcessorCall:
    """Read the arguments of ``_call_hf_processor``.

    Up to 0.27: (prompt, mm_data, mm_kwargs, tok_kwargs), and the result must hold the prompt's ``input_ids``; 0.32:
    (hf_data, hf_kwargs), without a prompt.
    """
    names = (
        ("prompt", "mm_data", "mm_kwargs", "tok_kwargs") if len(args) + len(kwargs) == 4 else ("hf_data", "hf_kwargs")
    )
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    data = given["mm_data"] if "prompt" in given else given["hf_data"]
    options = given["mm_kwargs"] if "prompt" in given else given["hf_kwargs"]
    return ProcessorCall(
        text=given.get("prompt"),
        images=list(data.get("images") or []),
        options={name: value for name, value in options.items() if name not in _TEXT_OPTIONS},
    )


# ------------------------------------------------------------------------------------------------------- the cache


def backend_base() -> type:
    """vLLM's ``AttentionBackend`` with the method that releases up to 0.27 declare abstract."""
    from vllm.v1.attention.backend import AttentionBackend

    class Base(AttentionBackend):
        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return (num_blocks, block_size, head_size)

    return Base


def state_views(kv_cache: Any) -> tuple[Tensor, ...]:
    """The state tensors bound to a recurrent layer: a tuple from 0.27 on, ``[[state, ...]]`` or a list before."""
    if len(kv_cache) == 1 and isinstance(kv_cache[0], list | tuple):
        kv_cache = kv_cache[0]
    return tuple(kv_cache)


def latent_pages(kv_cache: Any) -> Tensor:
    """The latent cache as [blocks, tokens, width]: 0.32 hands out [blocks, 1, tokens, width], 0.23 a list of one."""
    if isinstance(kv_cache, list | tuple):
        kv_cache = kv_cache[0]
    return kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache


def whole_state_copy() -> Callable[..., Any]:
    """The copy specification for prefix caching that copies one whole state.

    Right for both states here: without speculative decoding the window of the convolution is never shifted.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

    return get_temporal_copy_spec


def mamba_type() -> Any:
    """A member of vLLM's list of recurrent layers; only its identity is used, the backend is our own."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    return MambaAttentionBackendEnum.GDN_ATTN


def forward_metadata(prefix: str) -> Any | None:
    """This step's metadata for the layer ``prefix``; None when there is none (profiling, warm-up).

    vLLM passes None, an empty dict, or a dict without the layer.
    """
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # one entry a micro-batch
        if len(metadata) > 1:  # refused at the start; the first entry alone would be wrong for the others
            raise UnsupportedError("micro-batches are not supported; leave out --enable-dbo")
        metadata = metadata[0] if metadata else None
    if not isinstance(metadata, Mapping):
        return None
    return metadata.get(prefix)


def element_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return torch.empty((), dtype=dtype).element_size()
