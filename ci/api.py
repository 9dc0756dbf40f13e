"""The public API of each distribution as text, and its difference from the snapshot of the last release.

    python ci/api.py            differences of every package; exit status 1 where something was lost or changed
    python ci/api.py --write    renew packages/*/api.txt

Public is what a package's modules list in ``__all__``, followed to where it is defined, and in modules without
``__all__`` of rooms that users call (`MODULES`) every name without a leading underscore. Read from source, so nothing
is imported. A line is ``path(signature)``, ``path = class(fields)`` or ``path.method(signature)``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from dists import PACKAGES, Package

#: Modules without ``__all__`` whose public names are API all the same: what vendors and users import by full name.
MODULES = (
    *("plugin", "vllm.plugin", "vllm.registration", "vllm.versions", "errors", "testing.conformance"),
    *(f"contracts.{name}" for name in ("attn_res", "kda", "mla", "moe", "mxfp4", "norm", "situ", "vision")),
)

#: Rooms that are no Python API: the command line is used as a command.
INTERNAL = ("cli",)

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def snapshot(of: Package) -> list[str]:
    """All public lines of a package, sorted."""
    lines: set[str] = set()
    for path in sorted(of.source.rglob("*.py")):
        dotted = ".".join(path.relative_to(of.source).with_suffix("").parts)
        dotted = dotted.removesuffix("__init__").rstrip(".")
        parts = dotted.split(".")
        if any(part.startswith("_") for part in parts if part) or parts[0] in INTERNAL:
            continue
        tree = ast.parse(path.read_text())
        names = _listed(tree)
        if names is None:
            names = [n for n in _definitions(tree) if not n.startswith("_")] if dotted in MODULES else []
        for name in names:
            lines.update(_describe(of, path, tree, name, ".".join(p for p in (of.module, dotted, name) if p)))
    return sorted(lines)


def _listed(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def _definitions(tree: ast.Module) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _describe(of: Package, path: Path, tree: ast.Module, name: str, shown: str, depth: int = 0) -> Iterator[str]:
    node = _definitions(tree).get(name)
    if node is None:
        origin = _origin(of, path, tree, name) if depth < 5 else None
        if origin is None:
            yield shown  # a module, or something from outside
        else:
            yield from _describe(of, origin[0], ast.parse(origin[0].read_text()), origin[1], shown, depth + 1)
    elif isinstance(node, ast.FunctionDef):
        yield f"{shown}({ast.unparse(node.args)})"
    elif isinstance(node, ast.ClassDef):
        fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign) and not _private(n.target)]
        yield f"{shown} = class({', '.join(fields)})"
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or not method.name.startswith("_")):
                yield f"{shown}.{method.name}({ast.unparse(method.args)})"
    else:
        yield shown


def _private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _origin(of: Package, path: Path, tree: ast.Module, name: str) -> tuple[Path, str] | None:
    """The file of this package that ``name`` is imported from, and its name there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module or not node.module.startswith(of.module):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                base = of.source.joinpath(*node.module.split(".")[1:])
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    if file.is_file() and file != path:
                        return file, alias.name
    return None


def stored(of: Package) -> list[str] | None:
    """The snapshot of the last release, or None before the first."""
    path = of.folder / "api.txt"
    return path.read_text().splitlines() if path.is_file() else None


def breaks(of: Package) -> list[str]:
    """Public lines of the last snapshot that are no longer there as they were."""
    known = stored(of)
    return [] if known is None else sorted(set(known) - set(snapshot(of)))


def write(of: Package) -> None:
    """Renew the snapshot."""
    (of.folder / "api.txt").write_text("\n".join(snapshot(of)) + "\n")


def main() -> int:
    lost = False
    for of in PACKAGES.values():
        if "--write" in sys.argv:
            write(of)
            continue
        gone, new = breaks(of), sorted(set(snapshot(of)) - set(stored(of) or []))
        lost = lost or bool(gone)
        for sign, lines in (("-", gone), ("+", new)):
            for line in lines:
                print(f"{sign} {line}")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
