"""Which releases of vllm-ascend and torch_npu this wheel works with. Imports neither."""

from __future__ import annotations

import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: Distribution -> releases whose interfaces are used. vLLM's own range is in plugin.py.
SUPPORTED = {"vllm-ascend": ">=0.23,<0.24", "torch-npu": ">=2.10,<2.11"}


def found() -> dict[str, str | None]:
    """Distribution -> installed release, None where it is absent."""
    result: dict[str, str | None] = {}
    for name in SUPPORTED:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            result[name] = None
    return result


def mismatch() -> str | None:
    """One line naming every release that does not fit and what would, else None."""
    wrong = [
        f"{name} {release or 'is not installed'} (supported: {SUPPORTED[name]})"
        for name, release in found().items()
        if release is None or not _inside(release, SUPPORTED[name])
    ]
    return "; ".join(wrong) or None


def _inside(release: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(Version(release), prereleases=True)
    except InvalidVersion:
        return False
