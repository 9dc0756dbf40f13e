"""`k3 env`: one block to paste into a bug report, without secrets."""

from __future__ import annotations

from k3_core import CONTRACT_VERSION
from k3_core.cli import output, probe


def env(as_json: output.AsJson = False) -> None:
    """One block to paste into a bug report: versions, devices and the switches that matter; no secrets."""
    machine = probe.accelerators()
    facts = {
        "contract_version": CONTRACT_VERSION,
        "system": probe.system(),
        "accelerators": machine,
        "versions": probe.versions((*probe.WHEELS, *probe.LIBRARIES)),
        "in_tree_k3": probe.in_tree_k3(),
        "switches": probe.switches(),
    }
    if as_json:
        output.emit(facts)
        return
    system = probe.system()
    print(
        f"python {system['python']} on {system['system']}, {system['cores']} cores; contract version {CONTRACT_VERSION}"
    )
    for name, version in probe.versions((*probe.WHEELS, *probe.LIBRARIES)).items():
        print(f"{name} {version or 'not installed'}")
    print(f"{machine['kind']}, runtime {machine['runtime'] or 'none'}, driver {machine['driver'] or 'none'}")
    for index, one in enumerate(machine["devices"]):
        print(f"device {index}: {one['name']} {one['arch']} {output.size(one['memory'])}")
    for name, value in probe.switches().items():
        print(f"{name}={value}")
