"""Every form of KDA decode and verification against the shared cases of real size: ``check_kda_steps.py [part]``.

One line a form and operator: cases passed, failed and refused, and the first reasons. part: forms whose name has it.
"""

from __future__ import annotations

import json
import sys
import time

import sweep_kda

from k3_core.operators import Implementation
from k3_core.testing import conformance
from k3_nvidia.kernels import kda_step

WANTED = ("bfloat16",)


def main() -> int:
    """0 where nothing failed."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    failed = 0
    for operator, forms in (("kda_decode", sweep_kda.DECODE), ("kda_verify", sweep_kda.VERIFY)):
        implementation = Implementation(operator, "triton", getattr(kda_step, operator), kda_step.supports_step)
        for name, config in forms.items():
            if part not in name:
                continue
            began = time.monotonic()
            with sweep_kda.Tuned(config):
                report = conformance.run(
                    operator, implementation, "cuda", scales=("real",), only=lambda c: any(w in c.id for w in WANTED)
                )
            bad = [f"{row.case}: {row.reason[:400]}" for row in report.failures]
            failed += len(bad)
            counts = {v: sum(r.verdict == v for r in report.rows) for v in ("pass", "fail", "refused")}
            seconds = round(time.monotonic() - began, 1)
            print(
                json.dumps({"operator": operator, "form": name, **counts, "seconds": seconds, "why": bad[:3]}),
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
