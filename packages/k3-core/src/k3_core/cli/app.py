"""The `k3` command: one module a command, thin over the rooms that do the work."""

from __future__ import annotations

import io
import sys

import typer

from k3_core.cli.bench import bench
from k3_core.cli.doctor import doctor
from k3_core.cli.env import env
from k3_core.cli.plan import plan
from k3_core.cli.tiny import tiny
from k3_core.cli.verify import verify
from k3_core.errors import ConfigError, K3Error

_ADVICE = "check the path, its permissions and the room on its disk"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools for Kimi K3 checkpoints and installations.")
for command in (doctor, plan, verify, tiny, env):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point: a deliberate refusal is one line and exit status 1, not a traceback; so is what the disk refuses."""
    for stream in (sys.stdout, sys.stderr):  # a path may hold what their encoding has not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except K3Error as error:
        refusal: Exception = error
    except OSError as error:
        refusal = ConfigError(f"{error.filename or 'a file'}: {error.strerror or error}; {_ADVICE}")
    except MemoryError:
        refusal = ConfigError("the memory of this machine does not suffice; ask for less or use a larger one")
    else:
        return
    print(f"k3: {refusal}", file=sys.stderr)
    raise SystemExit(1) from refusal
