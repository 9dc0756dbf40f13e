"""Fuzzing of the chat format for as long as asked: ``python fuzz_chat.py --minutes 5 [--seed N] [--jobs 2]``.

Each seed makes one generated conversation (encode, decode, compare), one damaged reply (ids and text) and one soup of
markers and text, and checks every property of :mod:`chat_cases`. A failure prints its seed and ends with status 1; run
that seed again with ``--seed N --minutes 0``.
"""

import argparse
import multiprocessing
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import chat_cases as cases
from test_chat_decoder import ELEMENTS, MARKERS, WORDS
from test_chat_round_trip import check_round_trip

from k3_core.chat import encode
from k3_core.chat.json_stream import JsonStream


def one(seed: int) -> None:
    """All checks of one seed."""
    check_round_trip(seed)
    rng = random.Random(seed)
    messages = cases.conversation(rng)
    thinking = rng.random() < 0.7
    prompt = encode(messages[:-1], tokenizer=cases.TOKENIZER, thinking=thinking)
    whole = encode(messages, tokenizer=cases.TOKENIZER, thinking=thinking, add_generation_prompt=False)
    ids = cases.damage(rng, whole.ids[len(prompt.ids) :])
    cases.check_ids(ids, thinking, rng)
    cases.check_output(cases.TOKENIZER.decode(ids), thinking, rng)
    soup = "".join(rng.choice(rng.choice([MARKERS, ELEMENTS, WORDS, cases.PIECES])) for _ in range(rng.randrange(24)))
    cases.check_output(soup, thinking, rng)
    cases.check_ids(
        [rng.choice([rng.randrange(768), *range(513, 518)]) for _ in range(rng.randrange(60))], thinking, rng
    )
    text = "".join(rng.choice("[]{}\",:'\\ \n\tu0aé1-.eTrunfalsNo") for _ in range(rng.randrange(40)))
    made = []
    for pieces in ([text], cases.cut(rng, text), list(text)):
        stream = JsonStream()
        made.append("".join(stream.feed(piece) for piece in pieces) + stream.finish())
    assert made[0] == made[1] == made[2]
    cases.json.loads(made[0])


def work(first: int, step: int, minutes: float, failed: list[int]) -> None:
    """Seeds first, first + step, ... until the time is over or one fails."""
    end = time.monotonic() + 60 * minutes
    seed = first
    while True:
        try:
            one(seed)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} failed", flush=True)
            failed.append(seed)
            return
        if time.monotonic() >= end:
            print(f"seeds {first}..{seed} in steps of {step}: no failure", flush=True)
            return
        seed += step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    with multiprocessing.Manager() as manager:
        failed = manager.list()
        workers = [
            multiprocessing.Process(target=work, args=(options.seed + n, options.jobs, options.minutes, failed))
            for n in range(options.jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return 1 if list(failed) or any(worker.exitcode for worker in workers) else 0


if __name__ == "__main__":
    sys.exit(main())
