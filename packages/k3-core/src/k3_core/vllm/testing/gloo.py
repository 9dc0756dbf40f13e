"""One rank of a run over torch.distributed's gloo: real processes, vLLM's own groups and collectives.

``python -m k3_core.vllm.testing.gloo JSON``; JSON: {vendor: Vendor's fields, folder, ranks, rank, port, ids}. Rank 0
prints the hidden states, tensor and expert parallel, as JSON. :func:`hidden_states` starts all ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from k3_core.vllm.testing.vendor import Vendor


def hidden_states(vendor: Vendor, folder: Path, ids: list[int], ranks: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] before the final norm of one prompt from ``ranks`` processes: tensor, expert parallel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = {"vendor": astuple(vendor), "folder": str(folder), "ranks": ranks, "port": port, "ids": ids}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "k3_core.vllm.testing.gloo", json.dumps(asked | {"rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=300))
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error[-3000:]
    tensor_parallel, expert_parallel = json.loads(outputs[0][0].splitlines()[-1])
    return torch.tensor(tensor_parallel), torch.tensor(expert_parallel)


def main() -> None:
    """Join the group, build and load this rank's model, and run the prompt."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    vendor, folder, ranks, rank = Vendor(*asked["vendor"]), Path(asked["folder"]), asked["ranks"], asked["rank"]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Ranks with different names share no memory: then vLLM's collectives on a CPU are gloo's.
    os.environ["VLLM_DIST_IDENT"] = f"k3-rank-{rank}"
    with vendor.acting():
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        from k3_core.vllm.testing.ranks import Whole, build, fill, forward, settled

        config = settled(folder, ranks)
        with set_current_vllm_config(config):
            address = f"tcp://127.0.0.1:{asked['port']}"
            init_distributed_environment(ranks, rank, address, local_rank=rank, backend="gloo")
            initialize_model_parallel(ranks, 1, backend="gloo")
        whole = Whole(folder)
        results = []
        for expert_parallel in (False, True):
            config = settled(folder, ranks)
            config.parallel_config.enable_expert_parallel = expert_parallel
            model = build(vendor, config, whole.config)
            fill(model)
            results.append(forward(model, whole.embed(torch.tensor(asked["ids"]))).tolist())
    if rank == 0:
        print(json.dumps(results))
    sys.stdout.flush()
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
