"""Release machinery: fragments, versions, the public API, reproducible archives, notices, bills, workflows."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("k3-core", "k3-nvidia", "k3-amd", "k3-ascend")


def tool(name: str) -> ModuleType:
    """A module of ci/, which is no package."""
    folder = str(ROOT / "ci")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.startswith(folder)
    return importlib.import_module(name)


dists, api, release, sbom = tool("dists"), tool("api"), tool("release"), tool("sbom")


@dataclass(frozen=True)
class Copy(dists.Package):  # type: ignore[name-defined, misc]
    """A package somewhere else."""

    home: Path = Path()

    @property
    def folder(self) -> Path:
        return self.home / self.name


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """A copy of k3-amd with one fragment of each kind."""
    shutil.copytree(ROOT / "packages" / "k3-amd", tmp_path / "k3-amd", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    copy = Copy("k3-amd", tmp_path)
    shutil.rmtree(copy.folder / "changes", ignore_errors=True)
    (copy.folder / "changes").mkdir()
    for kind in release.KINDS:
        (copy.folder / "changes" / f"word.{kind}.md").write_text(f"Something\nwas {kind}.\n")
    return copy


@pytest.mark.parametrize("name", NAMES)
def test_versions_agree_and_fragments_are_well_formed(name: str) -> None:
    of = dists.PACKAGES[name]
    assert of.version == of.module_version
    assert release.VERSION.fullmatch(of.version)
    release.fragments(of)
    assert (of.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_vendors_accept_the_series_of_this_core() -> None:
    from packaging.specifiers import SpecifierSet

    core = dists.PACKAGES["k3-core"].version
    for name in NAMES[1:]:
        wanted = sbom.requirements(dists.PACKAGES[name])["k3-core"]
        assert SpecifierSet(wanted).contains(core, prereleases=True), name


def test_a_release_gathers_fragments_and_sets_both_versions(amd: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    release.release(amd, "0.2.0rc1")
    assert amd.version == amd.module_version == "0.2.0rc1"
    text = (amd.folder / "CHANGELOG.md").read_text()
    assert re.match(
        r"# Changelog of k3-amd\n\n## 0.2.0rc1 \(\d{4}-\d\d-\d\d\)\n\n### Added\n\n- Something was added.\n", text
    )
    assert "unreleased" not in text
    assert list((amd.folder / "changes").iterdir()) == []
    assert api.stored(amd) == api.snapshot(amd)
    assert "git tag k3-amd-v0.2.0rc1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="nothing to release"):
        release.release(amd, "0.3.0")


def test_a_version_must_grow(amd: Copy) -> None:
    release.release(amd, "0.2.0rc1")
    for version in ("0.1.9", "0.2.0rc1", "0.2.0b2"):
        (amd.folder / "changes" / "word.added.md").write_text("More.\n")
        with pytest.raises(SystemExit, match="released already"):
            release.release(amd, version)
    release.release(amd, "0.2.0")
    assert amd.version == "0.2.0"


@pytest.mark.parametrize("version", ["2", "v0.2.0", "0.2", "0.2.0-beta"])
def test_a_bad_version_changes_nothing(amd: Copy, version: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(version)):
        release.release(amd, version)
    assert len(list((amd.folder / "changes").iterdir())) == 4


@pytest.mark.parametrize("file", ["word.md", "word.new.md", "word.added.txt"])
def test_a_file_that_is_no_fragment_is_named(amd: Copy, file: str) -> None:
    (amd.folder / "changes" / file).write_text("x")
    with pytest.raises(SystemExit, match=file):
        release.fragments(amd)


def test_a_lost_name_needs_a_fragment_that_says_so(amd: Copy) -> None:
    plugin = amd.source / "plugin.py"
    before = plugin.read_text()
    release.release(amd, "0.2.0")
    plugin.write_text(before.replace("def register()", "def register(loud: bool)"))
    assert release.lost(amd) == ["k3_amd.plugin.register()"]
    for kind in release.KINDS:
        (amd.folder / "changes" / f"word.{kind}.md").write_text("Something.\n")
    assert release.check(amd) == []  # the fragments say that something changed
    for kind in ("changed", "removed"):
        (amd.folder / "changes" / f"word.{kind}.md").unlink()
    (problem,) = release.check(amd)
    assert "register" in problem


def test_the_api_follows_names_to_where_they_are_defined() -> None:
    lines = api.snapshot(dists.PACKAGES["k3-core"])
    assert "k3_core.config.load_config(source: Any)" in lines
    assert any(line.startswith("k3_core.checkpoint.CheckpointReader.tensors(") for line in lines)
    assert any(line.startswith("k3_core.contracts.attn_res.mix(") for line in lines)
    assert any(line.startswith("k3_core.vllm.registration.Wheel = class(name: str") for line in lines)
    assert not any("._" in line.split("(")[0] for line in lines if "__init__" not in line)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_public_was_lost_without_a_word(name: str) -> None:
    """Against the snapshot of the last release, once there is one; `python ci/api.py` shows the difference."""
    of = dists.PACKAGES[name]
    found = release.fragments(of)
    assert not release.lost(of) or found["changed"] or found["removed"]
    assert api.stored(of), "the snapshot is kept from the start"


def test_before_the_first_release_nothing_can_be_lost(amd: Copy) -> None:
    plugin = amd.source / "plugin.py"
    plugin.write_text(plugin.read_text().replace("def register()", "def enlist()"))
    assert api.breaks(amd)
    assert release.released(amd) == release.lost(amd) == []


@pytest.mark.slow
def test_archives_are_the_same_bytes_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    assert release.reproducible(("k3-amd",), tmp_path) == []
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl", ".gz"}
    wheel = next(tmp_path.glob("*.whl"))
    names = subprocess.run([sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True).stdout
    assert "licenses/LICENSE" in names
    assert "py.typed" in names


def test_notices_and_third_party_data_are_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "ci" / "sbom.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_dependency_without_an_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sbom.data()
    monkeypatch.setattr(sbom, "data", lambda: {**known, "component": known["component"][1:]})
    assert sbom.missing() == [f"{known['component'][0]['name']} has no entry"]


def test_licences_are_what_installed_metadata_says() -> None:
    from importlib.metadata import PackageNotFoundError, metadata

    checked = 0
    for entry in sbom.data()["component"]:
        try:
            found = metadata(entry["name"])
        except PackageNotFoundError:
            continue
        parts = [found.get("License-Expression") or "", found.get("License") or "", *found.get_all("Classifier", [])]
        said = " ".join(part for part in parts if part)
        if "icense" in said or found.get("License-Expression"):
            checked += 1
            assert re.split(r"[- ]", entry["licence"])[0].lower() in said.lower(), entry["name"]
    assert checked > 5


@pytest.mark.parametrize("name", NAMES)
def test_a_bill_names_every_requirement_with_its_range(name: str) -> None:
    of = dists.PACKAGES[name]
    bill = json.loads(json.dumps(sbom.bill(of)))
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", of.version)
    ranges = {part["name"]: part["properties"][0]["value"] for part in bill["components"]}
    assert ranges == {key: value or "any" for key, value in sbom.requirements(of).items()}


def test_workflows_call_sessions_only() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    files = sorted((ROOT / "ci" / "workflows").glob("*.yml"))
    assert [path.stem for path in files] == ["amd", "ascend", "cpu", "nvidia"]
    for path in files:
        runs = re.findall(r"- run: (.*)", path.read_text())
        assert runs
        for line in runs:
            match = re.fullmatch(r"python3\.11 ci ([\w-]+)(?: --[\w-]+)*", line)
            assert match, f"{path.name}: {line}"
            name = match[1]
            assert f'name="{name}"' in noxfile or f"def {name}(" in noxfile, f"{path.name}: no session {name}"
