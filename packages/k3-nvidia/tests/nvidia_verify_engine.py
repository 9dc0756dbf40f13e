"""An engine that verifies drafted tokens: ``nvidia_verify_engine.py CHECKPOINT``, prompts as JSON on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nvidia_support import Engine, our_model

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def main() -> None:
    asked = json.load(sys.stdin)
    with our_model():
        engine = Engine.start(
            Path(sys.argv[1]),
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
