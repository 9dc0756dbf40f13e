"""Stand-in for ``acl.rt``: a call that reaches the device fails by name."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"acl.rt.{name}: CANN is not installed, this is a stand-in")

    return absent
