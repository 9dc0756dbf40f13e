"""What the release tools know about the four distributions; standard library only."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("k3-core", "k3-nvidia", "k3-amd", "k3-ascend")


@dataclass(frozen=True)
class Package:
    """One distribution of this repository."""

    name: str

    @property
    def folder(self) -> Path:
        return ROOT / "packages" / self.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    @property
    def pyproject(self) -> Path:
        return self.folder / "pyproject.toml"

    @property
    def init(self) -> Path:
        return self.source / "__init__.py"

    @property
    def project(self) -> dict[str, Any]:
        project: dict[str, Any] = tomllib.loads(self.pyproject.read_text())["project"]
        return project

    @property
    def version(self) -> str:
        return str(self.project["version"])

    @property
    def module_version(self) -> str:
        found = re.search(r'^__version__ = "([^"]+)"', self.init.read_text(), re.M)
        return found[1] if found else ""


PACKAGES = {name: Package(name) for name in NAMES}


def package(name: str) -> Package:
    """The distribution called ``name``; SystemExit names the known ones."""
    if name not in PACKAGES:
        raise SystemExit(f"{name} is not a package of this repository: {', '.join(NAMES)}")
    return PACKAGES[name]
