"""MLIR 19 and LLVM 19 from Debian's packages, unpacked into a virtual environment: no root, nothing installed.

Usage: ``python ci/ascend_kernels/install/llvm.py SITE_PACKAGES`` (called by ci/envs.py; needs apt-get and dpkg-deb).
Packages are pinned by version and hash. Only the programs that verification calls are kept, below ``llvm-19`` of the
environment. Where a program ``mlir-opt-19`` is on the path already, or K3_LLVM19 names a folder, nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSION = "1:19.1.7-3~deb12u1"
PACKAGES = {
    ("mlir-19-tools", VERSION): "d4ab4c6f869dc441768fc93b2886fc5ad9d13ee016018d1e7dc9e86481e410cb",
    ("llvm-19", VERSION): "f91492c5b361ff12f540b9f6145cf638b5e0fb3f145fceabd6c4b9540eab4bf9",
    ("libllvm19", VERSION): "6edf3a8b28495cdba883d9760e0dca1a81983fc497a5f989dc64d0d96d23b4aa",
}
#: Libraries of the system that a slim image may lack; fetched only then.
SYSTEM = {
    ("libz3-4", "4.8.12-3.1"): "6221ca25ad5abcfbe1965801029d85a88b4775320384b4b716de8fab7a4d2f7a",
    ("libedit2", "3.1-20221030-2"): "1cf14abf2716d3279db12d0657a5737cf70074a1e71d3bdf73206625e3c89ce6",
    ("libbsd0", "0.11.7-2"): "bb31cc8b40f962a85b2cec970f7f79cc704a1ae4bad24257a822055404b2c60b",
    ("libmd0", "1.0.4-2"): "03539fd30c509e27101d13a56e52eda9062bdf1aefe337c07ab56def25a13eab",
    ("libffi8", "3.4.4-1"): "6d9f6c25c30efccce6d4bceaa48ea86c329a3432abb360a141f76ac223a4c34a",
}
PROGRAMS = ("mlir-opt", "mlir-translate", "opt", "llc")


def main(site_packages: str) -> None:
    """Unpack into the environment of a site-packages folder; does nothing the second time."""
    home = Path(site_packages).resolve().parents[2] / "llvm-19"
    if os.environ.get("K3_LLVM19") or all(shutil.which(f"{p}-19") for p in PROGRAMS):
        return
    if all((home / "bin" / p).exists() for p in PROGRAMS):
        return
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise SystemExit(
                f"{program} is missing: put MLIR 19 and LLVM 19 on the path (mlir-opt-19, mlir-translate-19, opt-19, "
                "llc-19) or name their folder in K3_LLVM19"
            )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        fetch(PACKAGES, Path(folder), tree)
        (home / "bin").mkdir(parents=True, exist_ok=True)
        (home / "lib").mkdir(exist_ok=True)
        for program in PROGRAMS:
            shutil.move(tree / "usr/lib/llvm-19/bin" / program, home / "bin" / program)
        shutil.move(next((tree / "usr/lib").glob("*/libLLVM.so.19.1")), home / "lib" / "libLLVM.so.19.1")
        if unresolved(home):
            fetch(SYSTEM, Path(folder), tree)
            for library in (tree / "usr/lib").glob("*/*.so.*"):
                shutil.copy(library, home / "lib" / library.name)
        if unresolved(home):
            raise SystemExit("libraries are missing on this system: " + ", ".join(unresolved(home)))


def fetch(packages: dict[tuple[str, str], str], folder: Path, tree: Path) -> None:
    """Download, verify and unpack. Raises SystemExit for a package that is not served or is not the pinned one."""
    names = [f"{name}={version}" for name, version in packages]
    done = subprocess.run(["apt-get", "download", *names], cwd=folder, capture_output=True, text=True)
    if done.returncode:  # the lists may be absent or old; refreshed ones go into the temporary folder
        (folder / "state/lists/partial").mkdir(parents=True, exist_ok=True)
        own = [f"-oDir::State={folder}/state", "-oDir::State::status=/var/lib/dpkg/status", f"-oDir::Cache={folder}"]
        subprocess.run(["apt-get", *own, "update"], cwd=folder, capture_output=True, check=False)
        done = subprocess.run(["apt-get", *own, "download", *names], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"apt-get download {' '.join(names)} failed (Debian 12 has them):\n{done.stderr[-1000:]}")
    wanted = set(packages.values())
    files = sorted(folder.glob("*.deb"))
    chosen = [f for f in files if hashlib.sha256(f.read_bytes()).hexdigest() in wanted]
    if len(chosen) != len(wanted):
        raise SystemExit(f"{len(wanted) - len(chosen)} of {', '.join(names)} do not have the pinned hash")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda f: subprocess.run(["dpkg-deb", "-x", f, tree], check=True), chosen))


def unresolved(home: Path) -> list[str]:
    """Shared libraries that the programs would not find."""
    programs = [str(home / "bin" / p) for p in PROGRAMS]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    return sorted({line.split()[0] for line in listed.splitlines() if "not found" in line})


if __name__ == "__main__":
    main(sys.argv[1])
