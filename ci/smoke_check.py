"""What must hold of installed wheels, run inside the environment that has them (see `lanes.smoke`).

    python ci/smoke_check.py k3-core k3-nvidia [--acts k3-core]

Every named wheel: its files are there (licence, type marker), versions agree, its entry point registers twice without
raising. With vLLM installed and ``--acts``: after all entry points ran, in both orders, exactly that wheel acts, and
the `k3` command diagnoses the environment.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path

GROUP = "vllm.general_plugins"


def entry_point(wheel: str) -> importlib.metadata.EntryPoint:
    found = importlib.metadata.entry_points(group=GROUP, name=wheel.replace("-", "_"))
    assert len(found) == 1, f"{wheel}: {len(found)} entry points in {GROUP}"
    return next(iter(found))


def check_files(wheel: str) -> None:
    """Versions agree; licence and type marker were installed."""
    module = importlib.import_module(wheel.replace("-", "_"))
    version = importlib.metadata.version(wheel)
    assert module.__version__ == version, f"{wheel}: metadata says {version}, the module {module.__version__}"
    names = {Path(str(file)).name for file in importlib.metadata.files(wheel) or ()}
    assert {"LICENSE", "py.typed"} <= names, f"{wheel}: LICENSE or py.typed is missing"
    print(f"{wheel} {version}: installed whole")


def check_registration(wheels: list[str], acts: str) -> None:
    """Whatever the order, exactly ``acts`` acts."""
    from k3_core.vllm import registration

    for order in (wheels, wheels[::-1]):
        registration.unregister()
        for wheel in [*order, *order]:
            entry_point(wheel).load()()
        active = registration.active()
        assert active is not None, f"no wheel acts; expected {acts}"
        assert active.name == acts, f"{active.name} acts, expected {acts}"
    registration.unregister()
    print(f"{' + '.join(wheels)}: {acts} acts")


def check_command() -> None:
    """The console script of the wheel runs and its conclusion is an object."""
    script = Path(sys.executable).with_name("k3")
    done = subprocess.run([script, "doctor", "--json"], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1), done.stderr
    problems = [finding["what"] for finding in report["findings"] if finding["level"] == "error"]
    print(f"k3 doctor: acting {report['acting']}, errors {problems}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+")
    parser.add_argument("--acts", help="the wheel that must act; needs vLLM")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="  %(message)s")
    for wheel in options.wheels:
        check_files(wheel)
        entry_point(wheel).load()()
        entry_point(wheel).load()()
    if options.acts:
        check_registration(options.wheels, options.acts)
        check_command()


if __name__ == "__main__":
    main()
