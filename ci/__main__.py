"""Run any session with nothing installed but Python 3.11: ``python3.11 ci demo``, ``python3.11 ci tests``.

The first argument names a nox session; the rest goes to that session. nox itself and the wheel builder are
installed into ``.venv/ci`` the first time. ``python3.11 ci`` alone lists the sessions and their flags; so does
``--help`` behind a session, which must not make environments and run it.
"""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import envs


def main(argv: list[str]) -> int:
    python = envs.ensure_ci()
    noxfile = envs.ROOT / "noxfile.py"
    command = [python, "-m", "nox", "-f", noxfile]
    if argv and argv[0] not in ("-l", "--list") and not {"-h", "--help"} & set(argv):
        command += ["-s", argv[0], "--", *argv[1:]]
    else:
        command += ["-l"]
    return subprocess.call([str(part) for part in command], cwd=envs.ROOT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
