"""k3-ascend's lane: wiring and numbers on the fake device, kernels through the vendor's compiler, hardware where it is.

Steps, each on wheels built from the tree:

1. environment ``ascend`` (torch_npu and vllm-ascend over stand-ins for CANN): everything but the kernels' own tests;
2. environment ``ascend-kernels`` (triton-ascend and Huawei's back end): numerics and unified-buffer budgets of kernels;
3. on a machine with an NPU: the same tests on the device, beside the vLLM that the machine or image brings.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import envs
import hardware
import lanes
import nox

FLAGS = {"--image", "--hardware-only", "--require-npu"}
#: A computation that an NPU has to do; the stand-ins give another result.
PROBE = "import torch, torch_npu; raise SystemExit(float((torch.ones(4, device='npu') + 1).sum().cpu()) != 8.0)"


def _tests(kernels: bool) -> list[str]:
    """Test files of k3-ascend: those of kernels, or all others."""
    files = sorted((envs.ROOT / "packages/k3-ascend/tests").glob("test_*.py"))
    return [str(p) for p in files if ("kernel" in p.name or "triton" in p.name) == kernels]


def wiring(runs: lanes.Runs, *options: str) -> None:
    """The model, its operators and the state copy beside real vllm and vllm-ascend, without a device."""
    python = str(envs.ensure("ascend", dev=True))
    envs.install_wheels("ascend", envs.build_wheels(("k3-core", "k3-ascend")))
    # Two processes of some 2 GB each: vllm-ascend keeps process-wide state, so a file stays in one.
    chosen = options or ("-n2", "--dist=loadfile")
    runs.pytest(python, "k3-ascend", *chosen, "-W", "ignore", "-m", "not gpu and not npu", *_tests(kernels=False))


def kernels(runs: lanes.Runs, *options: str) -> None:
    """Kernels: numerics of the lowered code, and what the back end makes of each."""
    python = str(envs.ensure("ascend-kernels", dev=True))
    envs.install_wheels("ascend-kernels", envs.build_wheels(("k3-core", "k3-ascend")))
    chosen = (*(options or ("-n2",)), "-m", "not gpu and not npu", *_tests(kernels=True))
    runs.pytest(python, "k3-ascend kernels", *chosen, env={"K3_REQUIRE_TOOLS": "1"})  # a missing tool is a failure


def on_hardware(runs: lanes.Runs, require: bool, *options: str) -> None:
    """The same tests on an NPU, or a word that they did not run."""
    python = hardware.home_python()
    found = subprocess.call([python, "-c", PROBE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    if found:
        python = hardware.overlay("ascend", ("k3-core", "k3-ascend"))
        tests = [*_tests(kernels=False), *_tests(kernels=True)]
        runs.pytest(python, "k3-ascend on the NPU", "-W", "ignore", "-m", "not gpu", *options, *tests)
        return
    marked = [Path(p).name for p in _tests(False) + _tests(True) if "has_npu" in Path(p).read_text()]
    print(f"\nnot run: no NPU that the torch of {python} sees: {', '.join(marked)}")
    if require:
        runs.fail("NPU required (--require-npu) and none found")


def test_ascend(session: nox.Session) -> None:
    """``--image`` runs all of it inside the image of ci/images/ascend; ``--hardware-only`` leaves out steps 1 and 2;
    ``--require-npu`` makes a missing NPU a failure; the rest goes to pytest."""
    asked, rest = FLAGS & set(session.posargs), [a for a in session.posargs if a not in FLAGS]
    if "--image" in asked:
        if code := hardware.run_in_image("ascend"):
            session.error(f"the lane in the image ended with {code}")
        return
    runs = lanes.Runs(session)
    if "--hardware-only" not in asked:
        wiring(runs, *rest)
        kernels(runs, *rest)
    on_hardware(runs, "--require-npu" in asked, *rest)
    runs.close()
