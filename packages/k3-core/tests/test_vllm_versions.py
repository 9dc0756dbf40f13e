"""What must hold beside every supported vLLM, the oldest included: everything loads, registers and resolves."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import k3_core.vllm
from k3_core.vllm import compat, plugin, registration, versions


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    plugin.register()
    assert registration.active() == plugin.WHEEL


def test_this_release_is_in_the_supported_range() -> None:
    assert versions.mismatch(versions.CORE_VLLM, versions.CORE_TRANSFORMERS) is None


MODULES = sorted(module.name for module in pkgutil.walk_packages(k3_core.vllm.__path__, "k3_core.vllm."))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_loads(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("architecture", registration.ARCHITECTURES)
def test_the_model_classes_are_what_this_vllm_expects(architecture: str) -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import has_inner_state, is_hybrid
    from vllm.model_executor.models.interfaces_base import is_text_generation_model

    model = ModelRegistry.models[architecture].load_model_cls()
    assert model.__module__.startswith("k3_core.vllm.")
    assert is_text_generation_model(model)
    assert has_inner_state(model)
    assert is_hybrid(model)


def test_the_configuration_class_carries_the_released_keys(k3_tiny: Path) -> None:
    from vllm.transformers_utils.config import get_config

    config = get_config(str(k3_tiny), trust_remote_code=False)
    assert config.model_type == "kimi_k3"
    assert config.media_placeholder_token_id == 533
    assert config.text_config.kv_lora_rank == 32
    assert config.text_config.linear_attn_config["kda_layers"] == [1, 2, 3, 5, 6, 7, 9, 10, 11]


def test_the_tokenizer_and_renderer_resolve() -> None:
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    assert TokenizerRegistry.load_tokenizer_cls("kimi_k3").__module__ == "k3_core.vllm.tokenizer"
    assert RENDERER_REGISTRY.load_renderer_cls("kimi_k3").__module__ == "k3_core.vllm.renderer"


def test_the_parsers_resolve() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert ReasoningParserManager.get_reasoning_parser("kimi_k3").__module__ == "k3_core.vllm.parsers"
    assert ToolParserManager.get_tool_parser("kimi_k3").__module__ == "k3_core.vllm.parsers"


def test_the_backends_can_be_instantiated_by_this_vllm() -> None:
    """No abstract method is left: vLLM never instantiates a backend, but it subclasses and calls them."""
    from k3_core.vllm.backends import LatentBackend, RecurrentBackend, StepBuilder

    for backend in (LatentBackend, RecurrentBackend):
        assert not getattr(backend, "__abstractmethods__", None)
        assert backend.get_kv_cache_shape(7, 16, 1, 48) == (7, 16, 48)
    assert not inspect.isabstract(StepBuilder)
    assert RecurrentBackend.is_ssm()
    assert not LatentBackend.is_ssm()


def test_the_copy_of_a_state_is_known_to_this_vllm() -> None:
    assert callable(compat.whole_state_copy())
    assert isinstance(compat.can_copy_states_on_cpu(), bool)
