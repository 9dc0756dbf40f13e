"""One rank of a tensor parallel group, in a process of its own: prompts and a decoding step, outputs to a file.

python ascend_rank.py CHECKPOINT RANK SIZE PORT EXPERT_PARALLEL OUTPUT

Plain and MXFP4 checkpoints in fp32 with experts unpacked; ModelSlim's in bfloat16, which its products give.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

PROMPTS = [[515, 337, 439, 269, 332, 17, 71, 338, 16], [191, 80]]
NEXT = [7, 9]


def outputs(checkpoint: Path, rank: int, size: int, port: int, expert_parallel: bool) -> torch.Tensor:
    """Hidden states before the final norm of both prompts, then of a token each: [T, H], the same on all ranks."""
    import ascend_reference_ops
    import ascend_support as support

    int4 = (checkpoint / "quant_model_description.json").exists()
    support.fake_device()
    support.plugins()
    ascend_reference_ops.install()
    config = support.settle(
        checkpoint,
        additional_config={} if int4 else {"k3_experts": "bf16"},
        tensor_parallel_size=size,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp" if size > 1 else None,
    )
    config.model_config.dtype = torch.bfloat16 if int4 else torch.float32
    if expert_parallel:
        # These ask the device for its communicators; two ranks of A2 use all-gather.
        from vllm_ascend.ops.fused_moe import moe_comm_method as paths

        paths.AlltoAllCommImpl = paths.MC2CommImpl = paths.FusedMC2CommImpl = lambda config: None
    with support.worker(config, rank, port):
        model = support.build(config)
        support.load(model, config)
        steps = support.Steps(model, config)
        steps.prefill(PROMPTS)
        first = steps.hidden
        steps.step([[token] for token in NEXT])
        return torch.cat([first, steps.hidden])


if __name__ == "__main__":
    folder, rank, size, port, expert_parallel, out = sys.argv[1:]
    torch.save(outputs(Path(folder), int(rank), int(size), int(port), expert_parallel == "1"), out)
