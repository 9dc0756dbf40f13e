"""Rules of the repository that no linter knows: forbidden imports, size budget, generated pages, file lengths."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
IN_TREE = ("vllm.models.kimi_k3", "vllm.model_executor.models.kimi_k3", "vllm.model_executor.models.kimi_linear")
LONGEST = 560  # lines; "about 500"


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_nothing_shipped_imports_an_in_tree_k3():
    assert SOURCES
    bad = {
        str(p.relative_to(ROOT)): names for p in SOURCES if (names := [n for n in imported(p) if n.startswith(IN_TREE)])
    }
    assert not bad


def test_import_scan_sees_both_forms(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from vllm.models import kimi_k3\n    import vllm.models.kimi_k3.config as c\n")
    assert {"vllm.models.kimi_k3", "vllm.models.kimi_k3.config"} <= imported(file)


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def test_working_tree_is_under_20_megabytes():
    assert sum(p.stat().st_size for p in tracked() if p.is_file()) < 20_000_000


def test_no_text_names_a_machine_path():
    words = ["/" + "work/", "/" + "root/", "/" + "opt/wheels"]
    bad = [
        f"{p.relative_to(ROOT)}: {word}"
        for p in tracked()
        if p.suffix in {".py", ".md", ".toml", ".yml", ".json", ".txt", ".sh"} and p.is_file()
        for word in words
        if word in p.read_text(errors="replace")
    ]
    assert not bad


def test_generated_pages_are_current():
    done = subprocess.run([sys.executable, ROOT / "ci" / "render_docs.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
