"""An engine that verifies drafted tokens: ``python -m k3_core.vllm.testing.verify JSON``, prompts as JSON on stdin.

JSON: [Vendor's fields, checkpoint].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from k3_core.vllm.testing.engine import Engine
from k3_core.vllm.testing.vendor import Vendor

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def main() -> None:
    """Print the tokens of every prompt and the widths of the rows that were verified."""
    fields, checkpoint = json.loads(sys.argv[1])
    asked = json.load(sys.stdin)
    with Vendor(*fields).acting():
        engine = Engine.start(
            Path(checkpoint),
            max_num_batched_tokens=64,
            speculative_config=SPECULATION,
            enable_prefix_caching=False,
        )
        tokens = engine.tokens(asked["prompts"], asked["count"])
        rows = [row for step in engine.steps for row in step]
        verified = sorted({count for computed, count, prompt in rows if computed >= prompt})
        engine.close()
    print(json.dumps({"tokens": tokens, "verified": verified}))


if __name__ == "__main__":
    main()
