"""Where the state copy enters a worker: after a model runner has bound its KV cache.

vllm-ascend 0.23 has two runners, each with its own ``initialize_kv_cache``; vLLM calls it after profiling and before
warm-up, graph capture and the first request. The model's constructor calls :func:`install`, which wraps the classes
that this process has loaded: the runner that will own the model is among them, because it is building the model.
Models without KDA layers of ours pass through unchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from k3_ascend.state_copy.plan import StateCopyLayer
from k3_ascend.state_copy.startup import initialise, withdraw

#: Module and class of vllm-ascend's two runner generations. Runners derived from these call the wrapped method.
RUNNERS = (
    ("vllm_ascend.worker.model_runner_v1", "NPUModelRunner"),
    ("vllm_ascend.worker.v2.model_runner", "NPUModelRunner"),
)
_METHOD = "initialize_kv_cache"
_MARK = "_k3_state_copy"


def install() -> tuple[str, ...]:
    """Wrap the loaded runner classes, each once; returns the qualified names of all that are wrapped.

    Raises RuntimeError if a runner has no initialize_kv_cache of its own: another release of vllm-ascend.
    """
    wrapped = []
    for module_name, class_name in RUNNERS:
        module = sys.modules.get(module_name)
        runner = getattr(module, class_name, None)
        if runner is None:
            continue
        method = vars(runner).get(_METHOD)
        if method is None:
            raise RuntimeError(f"{module_name}.{class_name} has no {_METHOD} of its own; k3-ascend does not know it")
        if not hasattr(method, _MARK):
            setattr(runner, _METHOD, _wrapped(method))
        wrapped.append(f"{module_name}.{class_name}")
    return tuple(wrapped)


def layers_of(runner: Any) -> dict[str, StateCopyLayer]:
    """KDA layers of this rank, by the name under which the forward context knows them."""
    context: Mapping[str, Any] = runner.vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, StateCopyLayer)}


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = layers_of(self)
        withdraw(layers)  # caches that are bound again may move: the old plans end here
        result = method(self, *args, **kwargs)
        if layers:
            initialise(layers, max_num_seqs=int(self.vllm_config.scheduler_config.max_num_seqs))
        return result

    setattr(initialize_kv_cache, _MARK, True)
    return initialize_kv_cache
