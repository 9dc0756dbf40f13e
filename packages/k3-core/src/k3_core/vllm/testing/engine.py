"""vLLM's engine in this process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Engine:
    """vLLM in this process; ``steps`` records (computed, scheduled, prompt tokens) of each row of each step."""

    llm: Any
    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)

    @classmethod
    def start(cls, checkpoint: Path, **options: Any) -> Engine:
        """Start on ``checkpoint``; ``options`` go to ``vllm.LLM``."""
        from vllm import LLM

        defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "seed": 0}
        engine = cls(LLM(str(checkpoint), **{**defaults, **options}))
        engine._watch()
        return engine

    @property
    def model(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model

    @property
    def config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    def generate(self, prompts: Sequence[Sequence[int]], count: int, images: Sequence[Any] | None = None) -> list[Any]:
        """Greedy outputs of all prompts at once; ids hold one pad an image, at most one image a prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        requests: list[dict[str, Any]] = [{"prompt_token_ids": list(p)} for p in prompts]
        for request, image in zip(requests, images or [None] * len(prompts), strict=True):
            if image is not None:
                request["multi_modal_data"] = {"image": [image]}
        return self.llm.generate(requests, sampling, use_tqdm=False)

    def tokens(self, prompts: Sequence[Sequence[int]], count: int, images: Sequence[Any] | None = None) -> list[Any]:
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, count, images)]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
        self.steps.clear()

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _watch(self) -> None:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            old = output.scheduled_cached_reqs
            computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
            rows = [
                (computed[name], count, scheduler.requests[name].num_prompt_tokens)
                for name, count in output.num_scheduled_tokens.items()
            ]
            self.steps += [rows] if rows else []
            return output

        scheduler.schedule = watched
