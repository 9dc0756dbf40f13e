"""The `k3` command as a program: what it prints, `--json` everywhere, and refusals of one line with exit status 1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import k3_core.cli.app as program
from k3_core.cli import bench
from k3_core.cli.app import app
from k3_core.config import load_config
from k3_core.errors import ConfigError, UnsupportedError


def k3(*args: str) -> subprocess.CompletedProcess:
    code = "from k3_core.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)


def invoke(*args: str) -> dict:
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_tiny_then_verify_then_damage(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    assert invoke("tiny", str(folder), "--layers", "4")["layers"] == 4
    assert invoke("verify", str(folder))["tensors"] > 100
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1000])
    done = k3("verify", str(folder))
    assert done.returncode == 1
    assert shard.name in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_command() -> None:
    done = CliRunner().invoke(app, ["--help"])
    for name in ("doctor", "plan", "verify", "tiny", "env", "bench"):
        assert name in done.output


@pytest.mark.parametrize(("rank", "heads", "width", "vocab"), [("tp16", 6, 192, 10240), ("tp8", 12, 384, 20480)])
def test_like_rank_writes_the_shapes_of_one_rank(tmp_path: Path, rank: str, heads: int, width: int, vocab: int) -> None:
    said = invoke("tiny", str(tmp_path), "--like-rank", rank)
    assert not said["weights"]
    assert not list(tmp_path.glob("*.safetensors"))
    text = load_config(tmp_path).text
    assert (text.num_attention_heads, text.linear_attn.num_heads, text.moe_intermediate_size) == (heads, heads, width)
    assert (text.vocab_size, text.num_experts, text.hidden_size, text.num_hidden_layers) == (vocab, 896, 7168, 8)
    assert [text.layer_kind(i) for i in range(8)] == ["kda"] * 3 + ["mla"] + ["kda"] * 3 + ["mla"]
    assert (tmp_path / "preprocessor_config.json").is_file()


@pytest.mark.parametrize("rank", ["tp2", "tp8", "tp96"])
def test_vllm_reads_a_ranks_configuration(tmp_path: Path, rank: str) -> None:
    """7168 hidden units over 12 heads are an odd number, which vLLM's own class refuses unless one is stated."""
    pytest.importorskip("vllm", reason="its configuration class is asked")
    from vllm.transformers_utils.config import get_config

    invoke("tiny", str(tmp_path), "--like-rank", rank)
    assert get_config(str(tmp_path), trust_remote_code=False).text_config.num_hidden_layers == 8


def test_like_rank_text_only(tmp_path: Path) -> None:
    invoke("tiny", str(tmp_path), "--like-rank", "tp16", "--text-only", "--layers", "4")
    config = load_config(tmp_path)
    assert config.vision is None
    assert config.architecture == "KimiLinearForCausalLM"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--like-rank", "ep8"], "tp16"),
        (["--like-rank", "tp5"], "num_attention_heads = 96"),
        (["--preset", "huge"], "k3-13"),
        (["--text-only"], "--like-rank"),
        (["--like-rank", "tp" + "9" * 5000], "tp16"),
        (["--like-rank", "tp8", "--seed", "3"], "--seed has no meaning"),
        (["--like-rank", "tp8", "--long-memory"], "--long-memory has no meaning"),
        (["--like-rank", "tp8", "--preset", "linear"], "--preset has no meaning"),
    ],
)
def test_tiny_refuses_by_name(tmp_path: Path, args: list[str], word: str) -> None:
    done = CliRunner().invoke(app, ["tiny", str(tmp_path / "x"), *args])
    assert isinstance(done.exception, ConfigError)
    assert word in str(done.exception)
    assert not (tmp_path / "x").exists()


def test_tiny_writes_over_nothing_unasked(tmp_path: Path) -> None:
    """A downloaded checkpoint has files of the same names."""
    precious = tmp_path / "config.json"
    precious.write_text("{}")
    done = k3("tiny", str(tmp_path))
    assert (done.returncode, precious.read_text()) == (1, "{}")
    assert str(tmp_path) in done.stderr
    assert "--force" in done.stderr
    assert k3("tiny", str(tmp_path), "--force", "--preset", "linear").returncode == 0
    assert load_config(tmp_path).is_kimi_linear


@pytest.mark.parametrize("options", [[], ["--like-rank", "tp8"]], ids=["weights", "rank"])
def test_tiny_that_cannot_write_leaves_nothing(tmp_path: Path, options: list[str]) -> None:
    """One line, exit status 1, and no half of a checkpoint: under a file, and on a disk that becomes full."""
    (tmp_path / "file").write_text("mine")
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
    for name, before in (("file", ""), ("file/below", ""), ("full", limit), ("a" * 300, "")):
        code = before + "from k3_core.cli import main; main()"
        command = [sys.executable, "-c", code, "tiny", str(tmp_path / name), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1, name
        assert done.stderr.startswith("k3: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert str(tmp_path / name) in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("bench", "ops", "--rows", "9" * 20, "--only", "situ"), "do not fit in memory"),
        (("bench", "ops", "--rows", "1", "--out", "/proc/k3.json"), "--out /proc/k3.json: cannot be written"),
        (("bench", "serve", "--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9/v1/models"),
        (("bench", "serve", "--url", "nowhere"), "no server answers"),
        (("plan", "--gpu", "x", "--memory-gib", "nan"), "--memory-gib nan"),
        (("plan", "--gpu", "x", "--memory-gib", "inf"), "--memory-gib inf"),
        (("verify", "/proc/self/mem"), "/proc/self/mem: cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(args: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_vllm", lambda: ["vllm"])
    monkeypatch.setattr(bench, "_run", lambda command: pytest.fail("started a benchmark"))
    done = CliRunner().invoke(app, [*args])
    assert isinstance(done.exception, ConfigError | UnsupportedError), done.exception
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_number_that_no_machine_has_is_refused_at_once() -> None:
    """Each of these once filled the memory or ran for ever."""
    for args in (
        ["tiny", "/nowhere", "--layers", "1000000000"],
        ["tiny", "/nowhere", "--like-rank", "tp8", "--layers", "1000000000"],
        ["plan", "--gpu", "h200", "--nodes", "1000000000"],
        ["plan", "--gpu", "x", "--memory-gib", "80", "--gpus-per-node", "1000000000"],
        ["verify", "/nowhere", "--jobs", "1000000000"],
    ):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 2, args
        assert "less than or equal to" in done.output


SEVERAL = """
import json, sys
from k3_core.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["k3", *arguments]
    try:
        main()
    except SystemExit as stopped:
        print("status", stopped.code or 0, flush=True)
"""


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("schöne Modelle 模型", "ascii"), (b"\xff".decode("utf-8", "surrogateescape"), "utf-8")],
    ids=["ascii", "bytes"],
)
def test_names_that_the_output_cannot_spell(tmp_path: Path, name: str, encoding: str) -> None:
    folder = str(tmp_path / name)
    plain = [["tiny", folder, "--force"], ["verify", folder], ["verify", f"{folder}-not"]]
    commands = [*plain, *([*command, "--json"] for command in plain)]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert "Traceback" not in done.stderr + done.stdout
    said = re.split(r"^status (\d)\n", done.stdout, flags=re.MULTILINE)
    assert said[1::2] == ["0", "0", "1"] * 2, done.stderr
    assert [json.loads(text)["path"] for text in said[6:-1:2]] == [command[1] for command in plain]


def test_what_the_disk_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/a/folder")

    monkeypatch.setattr(program, "app", refuse)
    with pytest.raises(SystemExit) as stopped:
        program.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"k3: /a/folder: Permission denied; {program._ADVICE}\n"


def test_bench_ops_times_what_it_names(tmp_path: Path) -> None:
    out, plot = tmp_path / "ops.json", tmp_path / "ops.svg"
    report = invoke(
        "bench", "ops", "--rows", "1,2", "--hidden", "64", "--seconds", "0.01", "--out", str(out), "--plot", str(plot)
    )
    assert {(row["operator"], row["tokens"]) for row in report["rows"]} == {
        (name, count) for name in ("attn_res", "route", "situ") for count in (1, 2)
    }
    assert all(row["implementation"] == "contract" and row["median_us"] > 0 for row in report["rows"])
    assert json.loads(out.read_text()) == report
    assert plot.read_bytes().startswith(b"<?xml")


def test_bench_serve_without_vllm_says_where_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.shutil, "which", lambda name: None)
    monkeypatch.setattr(bench.sys, "executable", "/nowhere/python")
    done = CliRunner().invoke(app, ["bench", "serve"])
    assert isinstance(done.exception, UnsupportedError)
    assert "vllm bench serve" in str(done.exception)


def test_bench_serve_keeps_vllms_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def run(command: list[str]) -> types.SimpleNamespace:
        seen.append(command)
        folder = Path(command[command.index("--result-dir") + 1])
        count = int(command[command.index("--max-concurrency") + 1])
        measured = {"completed": 4, "output_throughput": 12.5 * count, "median_ttft_ms": 3.0, "secret": 1}
        (folder / "result.json").write_text(json.dumps(measured))
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(bench, "_vllm", lambda: ["vllm"])
    monkeypatch.setattr(bench, "_check_server", lambda url: None)
    monkeypatch.setattr(bench, "_run", run)
    out, plot = tmp_path / "r.json", tmp_path / "r.svg"
    options = ["--prompts", "4", "--concurrency", "1,2", "--out", str(out), "--plot", str(plot)]
    report = invoke("bench", "serve", *options)
    assert report["rows"] == [
        {"concurrency": n, "completed": 4, "output_throughput": 12.5 * n, "median_ttft_ms": 3.0} for n in (1, 2)
    ]
    assert seen[0][:3] == ["vllm", "bench", "serve"]
    assert seen[0][seen[0].index("--num-prompts") + 1] == "4"
    assert json.loads(out.read_text()) == report
    assert plot.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("args", [("serve", "--concurrency", "0"), ("ops", "--rows", "1,x")])
def test_bench_refuses_counts_that_are_none(args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_vllm", lambda: ["vllm"])
    done = CliRunner().invoke(app, ["bench", *args])
    assert isinstance(done.exception, ConfigError)
    assert args[1] in str(done.exception)


def test_bench_serve_shows_the_end_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = types.SimpleNamespace(returncode=1, stdout="a line\nConnectionRefusedError: no server")
    monkeypatch.setattr(bench, "_vllm", lambda: ["vllm"])
    monkeypatch.setattr(bench, "_check_server", lambda url: None)
    monkeypatch.setattr(bench, "_run", lambda command: failed)
    done = CliRunner().invoke(app, ["bench", "serve"])
    assert "no server" in str(done.exception)


def test_bench_serve_keeps_the_rows_before_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, plot = tmp_path / "r.json", tmp_path / "r.svg"
    written: list[int] = []

    def run(command: list[str]) -> types.SimpleNamespace:
        count = int(command[command.index("--max-concurrency") + 1])
        written.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        if count == 4:
            return types.SimpleNamespace(returncode=1, stdout="the server is gone")
        measured = json.dumps({"completed": count, "output_throughput": 1.0})
        (Path(command[command.index("--result-dir") + 1]) / "result.json").write_text(measured)
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(bench, "_vllm", lambda: ["vllm"])
    monkeypatch.setattr(bench, "_check_server", lambda url: None)
    monkeypatch.setattr(bench, "_run", run)
    options = ["--concurrency", "1,2,4,8", "--out", str(out), "--plot", str(plot), "--json"]
    done = CliRunner().invoke(app, ["bench", "serve", *options])
    assert isinstance(done.exception, UnsupportedError)
    assert "4 requests in flight" in str(done.exception)
    assert "the server is gone" in str(done.exception)
    report = json.loads(out.read_text())
    assert [row["completed"] for row in report["rows"]] == [1, 2]
    assert "the server is gone" in report["failed"]
    assert json.loads(done.stdout) == report
    assert plot.read_bytes().startswith(b"<?xml")
    assert written == [0, 1, 2], "an interrupted run loses nothing either, and nothing runs after a failure"


def test_bench_ops_keeps_the_rows_before_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest, out = bench._time, tmp_path / "r.json"
    times: list[int] = []

    def fail_later(*args: Any) -> Any:
        times.append(1)
        if len(times) == 3:
            raise RuntimeError("out of memory")
        return honest(*args)

    monkeypatch.setattr(bench, "_time", fail_later)
    options = ["--only", "situ", "--rows", "1,2,3,4", "--seconds", "0.01", "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "ops", *options])
    assert str(done.exception) == "out of memory"
    report = json.loads(out.read_text())
    assert [row["tokens"] for row in report["rows"]] == [1, 2]
    assert report["failed"] == "out of memory"


def test_importing_the_command_does_not_import_vllm() -> None:
    program = "import sys, k3_core.cli; print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("command", ["serve", "ops"])
@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("--out", "absent/r.json", "which does not exist"),
        ("--plot", "absent/r.svg", "which does not exist"),
        ("--out", ".", "is a folder"),
        ("--plot", "r.words", "ending must be one of"),
    ],
)
def test_bench_refuses_a_place_it_cannot_write_before_it_measures(
    command: str, option: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for measures in ("_run", "_time"):
        monkeypatch.setattr(bench, measures, lambda *_: pytest.fail("measured what cannot be kept"))
    monkeypatch.setattr(bench, "_vllm", lambda: ["vllm"])
    done = CliRunner().invoke(app, ["bench", command, option, str(tmp_path / name)])
    assert isinstance(done.exception, ConfigError), done.exception
    assert says in str(done.exception)
    assert option in str(done.exception)


def test_bench_refuses_a_plot_without_matplotlib_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(bench.sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "_time", lambda *_: pytest.fail("measured what cannot be kept"))
    done = CliRunner().invoke(app, ["bench", "ops", "--plot", str(tmp_path / "r.svg")])
    assert isinstance(done.exception, UnsupportedError)
    assert "matplotlib" in str(done.exception)
