"""Engines and servers for tests: ``import serve_support`` (the conftest puts this folder on the path).

An :class:`Engine` is vLLM in this process: cheap to start, and its scheduler can be watched. A :class:`Server` is the
real ``vllm serve`` on loopback, asked over the OpenAI client. Both run the CPU reference model unless ``K3_IMPL`` says
otherwise. Start one of them per module; tests that need one are marked ``serve``.
"""

from __future__ import annotations

import base64
import gc
import importlib.metadata
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

#: Tests run beside others on few cores: one thread each, a small cache, nothing from the network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Scheduled:
    """What one request did in one engine step."""

    request: str
    num_computed: int
    num_tokens: int
    num_prompt: int

    @property
    def is_chunk(self) -> bool:
        """Part of a prompt, with more of the prompt still to come."""
        return self.num_computed + self.num_tokens < self.num_prompt


@dataclass
class Engine:
    """vLLM's engine in this process, with a record of what its scheduler did."""

    llm: Any
    steps: list[list[Scheduled]] = field(default_factory=list)
    preemptions: int = 0

    @classmethod
    def start(cls, checkpoint: Path, **options: Any) -> Engine:
        """Start on ``checkpoint``; ``options`` go to ``vllm.LLM``."""
        require_plugin()
        os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from vllm import LLM

        defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "seed": 0}
        try:
            engine = cls(LLM(str(checkpoint), **{**defaults, **options}))
        except BaseException:
            _clean_up()
            raise
        engine._watch()
        return engine

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def config(self) -> Any:
        """vLLM's settled configuration."""
        return self.llm.llm_engine.vllm_config

    @property
    def model(self) -> Any:
        """The model object."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int] = 16,
        images: Sequence[Sequence[Image.Image]] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """Greedy outputs of all prompts at once; ids hold one pad an image."""
        from vllm import SamplingParams

        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        requests: list[dict[str, Any]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for request, pictures in zip(requests, images or [()] * len(prompts), strict=True):
            if pictures:
                request["multi_modal_data"] = {"image": list(pictures)}
        parameters = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, **sampling) for n in lengths
        ]
        return self.llm.generate(requests, parameters, use_tqdm=False)

    def tokens(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[list[int]]:
        """As :meth:`generate`, the token ids only."""
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, *args, **options)]

    def forget(self) -> None:
        """Drop cached prefixes and the record of steps."""
        assert self.llm.reset_prefix_cache()
        self.steps.clear()
        self.preemptions = 0

    def chunks(self) -> list[Scheduled]:
        """All steps of requests whose prompt was cut."""
        return [row for step in self.steps for row in step if row.is_chunk]

    def close(self) -> None:
        """Free the engine, so that another can start in this process."""
        self.llm = None
        _clean_up()

    def _watch(self) -> None:
        scheduler = self.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            old = output.scheduled_cached_reqs
            computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
            rows = [
                Scheduled(name, computed[name], count, scheduler.requests[name].num_prompt_tokens)
                for name, count in output.num_scheduled_tokens.items()
            ]
            if rows:
                self.steps.append(rows)
            return output

        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.schedule = watched
        scheduler._preempt_request = counted


def _clean_up() -> None:
    """Let go of what an engine leaves in the process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


class Server:
    """The real ``vllm serve`` on a free port of loopback."""

    def __init__(self, checkpoint: Path, log: Path, *options: str, name: str = "k3", env: dict[str, str] | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        require_plugin()
        self.name, self.log = name, log
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(checkpoint)]
        command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(self.port), *options]
        self.command = command
        environment = {**os.environ, **ENVIRONMENT, **(env or {})}
        for only_here in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE"):  # a server compiles as users' do
            environment.pop(only_here, None)
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self, limit: float = 420) -> Server:
        """Return when the server is healthy; fail with the end of its log otherwise."""
        started = time.monotonic()
        while time.monotonic() - started < limit and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return self
            except OSError:
                time.sleep(0.5)
        self.stop()
        raise AssertionError("the server did not come up:\n" + "\n".join(self.lines()[-60:]))

    def lines(self) -> list[str]:
        """The log so far."""
        return self.log.read_text(errors="replace").splitlines()

    def client(self) -> Any:
        """An OpenAI client that does not retry."""
        from openai import OpenAI

        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def stop(self) -> None:
        """Stop the server and everything it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def require_plugin() -> None:
    """Fail where vLLM would not find k3-core: with the sources on the path but no wheel installed."""
    installed = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "k3_core" in {entry_point.name for entry_point in installed}, "install the k3-core wheel: no entry point"


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """``image`` as clients send it."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


def random_prompts(lengths: Iterable[int], seed: int, vocabulary: int = 512) -> list[list[int]]:
    """Prompts of ordinary tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
