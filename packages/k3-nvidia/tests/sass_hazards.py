"""Machine code that touches registers of matrix instructions still in flight.

``wgmma`` with its left operand in registers reads them, and writes its accumulator, some time after it was issued;
until ``wgmma.wait_group`` names its group, any other access is undefined (PTX, "wgmma.wait_group"). Triton 3.6 leaves
such products in flight at the end of a loop whose next iteration writes the operand (triton-lang/triton issue 9433),
and the assembler then hands their registers to whoever wants them. No test's numbers show that while the tensor cores
are quicker than the decode, so it is looked for in the code: every path through a kernel is walked with the list of
outstanding groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
REGISTER = re.compile(r"(?<![UA-Z])R(\d+)(\.64)?")
NO_RESULT = ("ST", "RED", "BAR", "LDGSTS", "LDGDEPBAR", "DEPBAR", "WARP", "BRA", "EXIT", "MEMBAR", "FENCE", "ERRBAR")
MOST = 32  # groups followed at a time (a loop that never waits has no end of them)
Group = frozenset[tuple[str, int]]  # ("operand" | "accumulator", register)
Code = list[tuple[str, str, str, str]]  # address, predicate, opcode, operands


def parse(sass: str) -> tuple[Code, dict[str, int]]:
    """Instructions of all kernels of a listing, and where its labels stand among them."""
    code: Code = []
    labels: dict[str, int] = {}
    for text in sass.splitlines():
        if found := LABEL.match(text):
            labels[found[1]] = len(code)
        elif found := LINE.search(text):
            code.append((found[1], found[2] or "", found[3], found[4]))
    return code, labels


def _width(opcode: str) -> int:
    if opcode.startswith("LDSM"):
        return int(opcode.rsplit(".", 1)[-1]) if opcode[-1].isdigit() else 1
    if ".128" in opcode:
        return 4
    return 2 if ".64" in opcode or ".WIDE" in opcode or opcode.startswith(("DADD", "DMUL", "DFMA")) else 1


def written(opcode: str, operands: str) -> set[int]:
    """Registers that an instruction (no matrix instruction) writes."""
    if opcode.startswith(NO_RESULT):
        return set()
    for part in operands.split(",")[:2]:
        found = re.fullmatch(r"R(\d+)(?:\.\w+)?", part.strip())
        if found:
            return set(range(int(found[1]), int(found[1]) + _width(opcode)))
        if not re.fullmatch(r"!?U?P\w+", part.strip()):
            break
    return set()


def read(operands: str) -> set[int]:
    """Registers that stand in the operands."""
    return {int(n) for n, _ in REGISTER.findall(operands)}


def product(opcode: str, operands: str) -> Group:
    """Registers of one HGMMA: accumulator first, then the left operand unless it is in shared memory."""
    parts = [p.strip() for p in operands.split(",")]
    shape = re.search(r"\.(\d+)x(\d+)x(\d+)\.(F32|F16)", opcode)
    assert shape is not None, opcode
    wide = int(shape[2]) // 2 // (1 if shape[4] == "F32" else 2)  # 64 rows x N columns over 128 threads
    first = int(parts[0].removeprefix("R"))
    used = {("accumulator", r) for r in range(first, first + wide)}
    if left := re.fullmatch(r"R(\d+)(?:\.reuse)?", parts[1]):
        used |= {("operand", r) for r in range(int(left[1]), int(left[1]) + 4)}
    return frozenset(used)


def _next(code: Code, labels: dict[str, int], i: int) -> Iterator[int]:
    _, predicate, opcode, operands = code[i]
    if opcode.startswith("BRA"):
        target = re.search(r"(\.L_x_\d+)", operands)
        if target and target[1] in labels:
            yield labels[target[1]]
        conditional = predicate or re.match(r"!?U?P\d", operands)
        if not conditional:
            return
    elif opcode.startswith("EXIT") and not predicate:
        return
    if i + 1 < len(code):
        yield i + 1


def hazards(sass: str) -> list[str]:
    """One line for every instruction that touches a register of an outstanding product."""
    code, labels = parse(sass)
    found: dict[int, str] = {}
    # where, committed groups (oldest first), and the one that is open
    seen: set[tuple[int, tuple[Group, ...], Group]] = set()
    todo: list[tuple[int, tuple[Group, ...], Group]] = [(0, (), frozenset())]
    while todo:
        i, groups, opened = todo.pop()
        if i >= len(code) or (i, groups, opened) in seen:
            continue
        seen.add((i, groups, opened))
        address, _, opcode, operands = code[i]
        if opcode.startswith("HGMMA"):
            opened |= product(opcode, operands)
            if "gsb0" in operands:
                groups, opened = (*groups, opened)[-MOST:], frozenset()
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.rsplit(",", 1)[1].strip(), 16)
            groups = groups[max(0, len(groups) - left) :]
        elif groups or opened:
            busy = opened.union(*groups)
            out, all_ = written(opcode, operands), read(operands)
            bad = [f"{kind} R{r}" for kind, r in sorted(busy) if r in out or (kind == "accumulator" and r in all_)]
            if bad:
                found[i] = f"{address} {opcode} {operands}: {', '.join(bad)} in flight"
        todo.extend((j, groups, opened) for j in _next(code, labels, i))
    return [found[i] for i in sorted(found)]
