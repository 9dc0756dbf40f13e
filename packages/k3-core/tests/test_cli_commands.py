"""The `k3` command: what it prints, and that a refusal is one line with exit status 1."""

import json
import subprocess
import sys


def k3(*args: str) -> subprocess.CompletedProcess:
    code = "from k3_core.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)


def test_tiny_then_verify_then_damage(tmp_path):
    folder = tmp_path / "tiny"
    assert k3("tiny", str(folder)).returncode == 0
    done = k3("verify", str(folder), "--full", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors_read"] > 100
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1000])
    done = k3("verify", str(folder))
    assert done.returncode == 1
    assert shard.name in done.stderr
    assert "Traceback" not in done.stderr


def test_env_names_versions():
    done = k3("env")
    assert done.returncode == 0
    assert "contract version" in done.stdout
    assert "torch " in done.stdout
