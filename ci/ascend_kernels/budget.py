"""The unified-buffer table: every kernel variant through Huawei's compiler for three generations.

    python ci/ascend_kernels/budget.py            compare with ci/ascend_kernels/unified_buffer.json
    python ci/ascend_kernels/budget.py --write    make the table anew

A row fails where the compiler refuses the kernel (overflow), where more than 85 % of the unified buffer is taken, or
where memory is walked element by element. The table is compared within TOLERANCE, so that a change of source that moves
a kernel's use is seen and written down.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ascend_kernels import bishengir, calls, lower

TABLE = Path(__file__).with_name("unified_buffer.json")
LIMIT = 0.85
TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """One kernel variant on one generation: share of the unified buffer, bytes of L1, faults."""

    kernel: str
    generation: str
    share: float
    l1: int
    faults: tuple[str, ...]


def label(kernel: Any, variant: lower.Variant) -> str:
    """The kernel and what distinguishes its variants, readable."""
    types = [t for _, t in variant.signature if t.startswith("*")]
    constants = ",".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in variant.constants)
    return f"{kernel.__name__}[{constants}] {' '.join(t[1:] for t in types)}"


def measure(generation: str, kernel: Any, variant: lower.Variant, linalg: str, folder: Path) -> Row:
    """Compile one variant for one generation."""
    result = bishengir.compile_for(linalg, bishengir.TARGETS[generation], folder)
    faults = []
    if result.error:
        faults.append(f"does not compile: {result.error}")
    elif result.ub == 0:
        faults.append("the compiler said nothing about memory")
    if result.ub > LIMIT * result.limit:
        faults.append(f"takes {result.ub} of {result.limit} bytes, more than {LIMIT:.0%}")
    faults += [f"walks memory by elements: {walk}" for walk in result.scalar]
    if "ExtractedLoadOrStore" in linalg:
        faults.append("an access has no structure (the front end made a loop of single elements)")
    return Row(label(kernel, variant), generation, round(result.ub / result.limit, 3), result.l1, tuple(faults))


def rows(generations: tuple[str, ...] = tuple(bishengir.TARGETS), workers: int = 2) -> Iterator[Row]:
    """Every variant on every generation; those that differ from another in the type of an index only on the first."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        jobs = []
        for number, (kernel, variant) in enumerate(calls.variants()):
            linalg = lower.to_linalg(kernel, variant)
            wide_index = any(kind == "*i64" for _, kind in variant.signature)
            for generation in generations[:1] if wide_index else generations:
                place = Path(folder) / f"{number}-{generation}"
                jobs.append(pool.submit(measure, generation, kernel, variant, linalg, place))
        for job in jobs:
            yield job.result()


def to_table(found: list[Row]) -> dict[str, dict[str, list[float]]]:
    """{kernel: {generation: [share, L1 bytes]}}."""
    table: dict[str, dict[str, list[float]]] = {}
    for row in found:
        table.setdefault(row.kernel, {})[row.generation] = [row.share, row.l1]
    return table


def differences(found: list[Row], table: dict[str, dict[str, list[float]]]) -> list[str]:
    """What is wrong with the rows, or not as in the table: one sentence each."""
    said = [f"{row.kernel} on {row.generation}: {fault}" for row in found for fault in row.faults]
    for row in found:
        known = table.get(row.kernel, {}).get(row.generation)
        if known is None:
            said.append(f"{row.kernel} on {row.generation}: not in the table; run budget.py --write and review it")
        elif abs(known[0] - row.share) > TOLERANCE:
            said.append(f"{row.kernel} on {row.generation}: takes {row.share:.1%}, the table says {known[0]:.1%}")
    gone = set(table) - {row.kernel for row in found}
    return said + [f"{kernel}: in the table, but no launcher starts it" for kernel in sorted(gone)]


def write(found: list[Row]) -> None:
    """Write the table: one line a kernel."""
    table = to_table(found)
    lines = [f" {json.dumps(kernel)}: {json.dumps(table[kernel])}" for kernel in sorted(table)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: list[str]) -> int:
    """Command line."""
    if bishengir.missing():
        raise SystemExit(bishengir.missing())
    found = list(rows())
    if "--write" in argv:
        write(found)
    wrong = differences(found, json.loads(TABLE.read_text()))
    print("\n".join(wrong) or f"{len(found)} rows agree with {TABLE.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
