"""The hardware part of a vendor's lane: our wheels beside the vLLM that a machine or an image brings, and nothing else.

The python that has vLLM is the one that started ``ci`` (an image's ``python3``), or ``K3_HARDWARE_PYTHON``. Wheels and
test tools go into an environment laid over it, so that the machine's own installation is left as it was and a tree on
somebody's path cannot stand in for a wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import envs

#: What `pytest` needs beside a vendor's vLLM; of its versions those in ``dev.txt`` are taken.
TEST_TOOLS = ("pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "hypothesis", "sortedcontainers")
#: Options that let a container see the vendor's devices.
DEVICES = {
    "nvidia": ("--gpus", "all", "--ipc", "host"),
    "amd": ("--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video", "--ipc", "host"),
    "ascend": ("--privileged", "--ipc", "host", "-v", "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"),
}


def home_python() -> str:
    """The python whose vLLM and torch a hardware test uses."""
    return os.environ.get("K3_HARDWARE_PYTHON") or getattr(sys, "_base_executable", sys.executable)


def overlay(vendor: str, packages: tuple[str, ...]) -> str:
    """An environment of wheels built here over `home_python`; return its python."""
    below, home = home_python(), envs.VENVS / f"hardware-{vendor}"
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([below, "-m", "venv", str(home)], check=True)
    ask = "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"
    paths = json.loads(subprocess.run([below, "-c", ask], check=True, capture_output=True, text=True).stdout)
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    (envs.site(home) / "k3-below.pth").write_text(lines)
    pins = (envs.CONSTRAINTS / envs.DEV).read_text().split()
    envs.pip(home, "--no-deps", *(pin for pin in pins if pin.partition("==")[0] in TEST_TOOLS))
    envs.pip(home, "--no-deps", "--no-index", *map(str, envs.build_wheels(packages)))
    return str(envs.python_of(home))


def engine() -> str:
    """docker or podman; SystemExit where there is neither."""
    for name in ("docker", "podman"):
        if found := shutil.which(name):
            return found
    raise SystemExit("--image: neither docker nor podman is on this machine; run the lane without --image")


def run_in_image(vendor: str) -> int:
    """Build ``ci/images/<vendor>`` from the committed tree and run its lane inside; the container's exit status."""
    tool, tag = engine(), f"k3-{vendor}-lane"
    definition = Path("ci") / "images" / vendor / "Dockerfile"
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "tree.tar"
        subprocess.run(["git", "archive", "-o", str(archive), "HEAD"], cwd=envs.ROOT, check=True)
        tree = Path(folder) / "tree"
        tree.mkdir()
        subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True)
        build = [tool, "build", "-t", tag, "-f", str(tree / definition), str(tree)]
        if code := subprocess.call(build):
            return code
    return subprocess.call([tool, "run", "--rm", *DEVICES[vendor], tag])
