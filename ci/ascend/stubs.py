"""Inert stand-ins for the libraries that an Ascend installation expects from CANN (and torch's CUDA build from NVIDIA).

torch_npu and vllm-ascend are on the index, CANN is not: ``import torch_npu`` stops at ``libhccl.so``. What the sessions
check here (operator schemas, shape functions, registration, wiring) runs before any of CANN does, so libraries that
load, hold exactly the undefined symbols, and answer "one Ascend910B3, nothing else works" are enough.

Three groups, each put where the dynamic loader looks for it anyway, so that nothing has to be set in the environment:

* ``torch/lib``: NVIDIA's libraries, and torch's own CUDA half (1.2 GB), which the index's torch 2.10 brings along;
* ``torch_npu/lib``: CANN, as torch_npu asks for it;
* ``vllm_ascend/lib``: the rest, as vllm-ascend's compiled operators ask for it.

Usage: ``python ci/ascend/stubs.py SITE_PACKAGES`` (needs gcc, nm and readelf). Running it twice changes nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Libraries of the system: their symbols are provided, and no stand-in is made for them.
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1")
LOADER = "ld-linux-x86-64.so.2"
MARK = "k3_stand_in"
#: C++ names of data: virtual tables, type information and guards are read, not called.
DATA = re.compile(r"^_ZT[VSTC]|^_ZGV")
#: Type information is compared by its name even where nothing of the type is used, so it gets one.
TYPE = re.compile(r"^_ZTI(.*)")


@dataclass(frozen=True)
class Group:
    """A folder of stand-ins: for what ``modules`` need and neither ``providers`` nor the system has."""

    folder: str
    modules: tuple[str, ...]
    providers: tuple[str, ...] = ()
    #: Files that are dropped and stood in for although they exist.
    dropped: tuple[str, ...] = ()
    #: C source with the functions that must answer something.
    answers: str | None = None
    #: Further sonames that are loaded by name at run time.
    also: tuple[str, ...] = field(default=())


GROUPS = (
    Group(
        folder="torch/lib",
        modules=("torch/lib/*.so*", "torch/_C*.so", "torchvision/_C*.so"),
        dropped=("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so"),
        answers="answers_cuda.c",
    ),
    Group(
        folder="torch_npu/lib",
        modules=("torch_npu/lib/lib*.so", "torch_npu/_C*.so", "torch_npu/dynamo/torchair/core/*.so"),
        providers=("torch/lib/*.so*",),
        answers="answers_cann.c",
    ),
    Group(
        folder="vllm_ascend/lib",
        modules=("vllm_ascend/vllm_ascend_C*.so", "vllm_ascend/libvllm_ascend_kernels.so"),
        providers=("torch/lib/*.so*", "torch_npu/lib/*.so"),
    ),
)


def main(site: Path) -> None:
    """Make all groups below ``site``."""
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is needed to make stand-ins for CANN's libraries (Debian: build-essential)")
    for group in GROUPS:
        made, symbols = make(site, group)
        print(f"[stubs] {group.folder}: {made} libraries, {symbols} symbols")
    shutil.copytree(HERE / "acl", site / "acl", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def make(site: Path, group: Group) -> tuple[int, int]:
    """Make the stand-ins of one group; returns how many libraries and symbols."""
    folder = site / group.folder
    folder.mkdir(exist_ok=True)
    dropped = [folder / name for name in group.dropped]
    for file in (*folder.glob("*.so*"), *dropped):
        if file.exists() and (file in dropped or _is_stand_in(file)):
            file.unlink()
    modules = _files(site, group.modules)
    if not modules:
        raise SystemExit(f"nothing matches {group.modules} below {site}")
    present = {path.name for path in [*modules, *_files(site, group.providers)]}
    wanted = _needed(modules, group.also) - present - {*SYSTEM, LOADER}
    wanted = {name for name in wanted if not name.startswith("libpython")}
    defined = _symbols([*modules, *_files(site, group.providers), *_system()], "--defined-only")
    undefined = _symbols(modules, "--undefined-only", kinds="U")
    missing = sorted(s for s in undefined - defined if not s.startswith(("Py", "_Py")))
    base = f"lib{MARK}_{folder.parent.name}.so"
    with tempfile.TemporaryDirectory() as scratch:
        _build_base(Path(scratch), folder / base, missing, group.answers)
        for soname in sorted(wanted):
            _build_empty(Path(scratch), folder, soname, base, _versions(modules, soname))
    return len(wanted), len(missing)


def _build_base(scratch: Path, out: Path, missing: Iterable[str], answers: str | None) -> None:
    """One library with all symbols: functions that return 0, zeroed data, and the answers in C."""
    sources, answered = [], set()
    if answers:
        source = HERE / answers
        sources.append(str(source))
        answered = set(re.findall(r"^\w[\w *]*?(\w+)\(", source.read_text(), re.MULTILINE))
    names = [name for name in missing if name not in answered]
    code = [".text"]
    for name in names:
        if not DATA.match(name) and not TYPE.match(name):
            code += [f'.globl "{name}"', f'.type "{name}",@function', f'"{name}":']
    code += ["  xor %eax,%eax", "  xor %edx,%edx", "  ret", ".bss", ".balign 64"]
    for name in filter(DATA.match, names):
        code += [f'.globl "{name}"', f'.type "{name}",@object', f'"{name}":', "  .zero 1024"]
    code += [".data", ".balign 64"]
    for match in filter(None, map(TYPE.match, names)):
        code += [f'.globl "{match[0]}"', f'.type "{match[0]}",@object', f'"{match[0]}":']
        code += [
            "  .quad _ZTVN10__cxxabiv117__class_type_infoE+16",
            "  .quad 1f",
            f'1: .asciz "{match[1]}"',
            ".balign 8",
        ]
    code += ['.section .note.GNU-stack,"",@progbits', ""]
    assembly = scratch / "symbols.s"
    assembly.write_text("\n".join(code))
    needs = ["-Wl,--no-as-needed", "-l:libstdc++.so.6"] if any(map(TYPE.match, names)) else []
    _gcc(out, str(assembly), *sources, *needs)


def _build_empty(scratch: Path, folder: Path, soname: str, base: str, versions: list[str]) -> None:
    """A library without code that brings the base library along; it declares the symbol versions it is asked for."""
    options = ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{base}", "-Wl,-rpath,$ORIGIN"]
    if versions:
        script = scratch / "versions.map"
        script.write_text("".join(f"{version} {{ }};\n" for version in versions))
        options.append(f"-Wl,--version-script={script}")
    empty = scratch / "empty.c"
    empty.write_text("")
    _gcc(folder / soname, str(empty), *options)


def _gcc(out: Path, *args: str) -> None:
    command = ["gcc", "-shared", "-nostdlib", "-fPIC", "-O1", f"-Wl,-soname,{out.name}", "-o", str(out), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"gcc could not make {out.name}:\n{done.stderr[-2000:]}")


def _is_stand_in(file: Path) -> bool:
    return MARK.encode() in file.read_bytes() if file.stat().st_size < 4_000_000 else False


def _files(site: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in site.glob(pattern)})


def _system() -> list[Path]:
    """Where the system's libraries are, as gcc finds them."""
    found = []
    for name in (*SYSTEM, LOADER):
        path = Path(_run("gcc", f"-print-file-name={name}").strip())
        if path.is_absolute():
            found.append(path)
    return found


def _needed(modules: Iterable[Path], also: Iterable[str]) -> set[str]:
    text = _run("readelf", "-d", *map(str, modules))
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)) | set(also)


def _symbols(files: Iterable[Path], which: str, kinds: str = "") -> set[str]:
    """Dynamic symbols without their versions; ``kinds`` restricts to nm's letters."""
    result = set()
    for line in _run("nm", "-D", which, *map(str, files)).splitlines():
        parts = line.split()
        if len(parts) >= 2 and (not kinds or parts[-2] in kinds):
            result.add(parts[-1].split("@")[0])
    return result


def _versions(modules: Iterable[Path], soname: str) -> list[str]:
    """The symbol versions that ``modules`` demand of the library ``soname``."""
    found: set[str] = set()
    for module in modules:
        current = ""
        for line in _run("readelf", "-V", "-W", str(module)).splitlines():
            if match := re.search(r"File: (\S+)", line):
                current = match[1]
            elif (match := re.search(r"Name: (\S+)\s+Flags", line)) and current == soname:
                found.add(match[1])
    return sorted(found)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
