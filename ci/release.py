"""Release one distribution: gather changelog fragments, set the version, renew the API snapshot; check reproducibility.

    python ci/release.py k3-core --check        what a release would contain; touches nothing
    python ci/release.py k3-core 0.2.0          write CHANGELOG.md, version and api.txt; commit and tag stay yours
    python ci/release.py --reproducible [OUT]   build every wheel and sdist twice and compare their bytes

A fragment is ``packages/<name>/changes/<word>.<kind>.md``, kind one of added, changed, fixed, removed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import api
from dists import NAMES, PACKAGES, ROOT, Package, package

KINDS = ("added", "changed", "fixed", "removed")
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?")
#: Time stamp of every file in an archive, 2026-01-01: an archive depends on the tree alone.
EPOCH = "1767225600"


def fragments(of: Package) -> dict[str, list[Path]]:
    """Kind -> fragment files in order of their names. SystemExit for a file that is not a fragment, or an empty one."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted((of.folder / "changes").glob("*")):
        parts = path.name.split(".")
        if len(parts) != 3 or parts[1] not in KINDS or parts[2] != "md":
            raise SystemExit(f"{path.relative_to(ROOT)}: expected <word>.<kind>.md, kind one of {', '.join(KINDS)}")
        if not path.read_text().strip():
            raise SystemExit(f"{path.relative_to(ROOT)}: is empty")
        found[parts[1]].append(path)
    return found


def released(of: Package) -> list[str]:
    """Versions with a dated section in the changelog, newest first."""
    return re.findall(r"^## (\S+) \(\d", (of.folder / "CHANGELOG.md").read_text(), re.M)


def lost(of: Package) -> list[str]:
    """Public lines of the last release that are gone or changed; before the first release nothing can be lost."""
    return api.breaks(of) if released(of) else []


def section(version: str, date: str, found: dict[str, list[Path]]) -> str:
    """The changelog section of a release."""
    parts = [f"## {version} ({date})", ""]
    for kind, paths in found.items():
        if paths:
            parts += [f"### {kind.capitalize()}", ""]
            parts += ["- " + " ".join(path.read_text().split()) for path in paths]
            parts.append("")
    return "\n".join(parts)


def check(of: Package) -> list[str]:
    """What stands in the way of a release of ``of``; prints what it would contain."""
    found = fragments(of)
    print(section("NEXT", "today", found))
    problems = []
    if of.version != of.module_version:
        problems.append(f"{of.name}: pyproject says {of.version}, __version__ says {of.module_version}")
    if not any(found.values()):
        problems.append(f"{of.name}: no changelog fragment, so there is nothing to release")
    removed = lost(of)
    if removed and not (found["changed"] or found["removed"]):
        problems.append(f"{of.name}: the public API lost or changed {', '.join(removed)} and no fragment says so")
    return problems


def release(of: Package, version: str) -> None:
    """Write the release into the tree. SystemExit where `check` finds a problem or the version does not grow."""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"{version}: expected MAJOR.MINOR.PATCH, optionally with a1, b1 or rc1")
    problems = check(of)
    if problems:
        raise SystemExit("\n".join(problems))
    found = fragments(of)
    changelog = of.folder / "CHANGELOG.md"
    known = released(of)
    if known and order(version) <= max(map(order, known)):
        raise SystemExit(f"{of.name} {version}: {known[0]} is released already; take a larger number")
    lines = changelog.read_text().split("\n")
    lines = [line for line in lines if not re.fullmatch(r"## [\w.]+ \(unreleased\)", line)]
    head, rest = lines[0], "\n".join(lines[1:]).strip()
    text = section(version, datetime.date.today().isoformat(), found)
    changelog.write_text(f"{head}\n\n{text}\n{rest}".rstrip() + "\n")
    _replace(of.pyproject, r'^version = "[^"]+"', f'version = "{version}"')
    _replace(of.init, r'^__version__ = "[^"]+"', f'__version__ = "{version}"')
    for paths in found.values():
        for path in paths:
            path.unlink()
    api.write(of)
    print(f"{of.name} {version} is in the tree; review, commit, then: git tag {of.name}-v{version}")


def order(version: str) -> tuple[int, int, int, str, int]:
    """A key that sorts versions: 0.2.0a1 < 0.2.0rc1 < 0.2.0."""
    match = VERSION.fullmatch(version)
    assert match, version
    major, minor, patch, stage, number = match.groups()
    return int(major), int(minor), int(patch), stage or "z", int(number or 0)


def _replace(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, path.read_text(), count=1, flags=re.M)
    if count != 1:
        raise SystemExit(f"{path.relative_to(ROOT)}: no line matches {pattern}")
    path.write_text(text)


def build(of: Package, out: Path, source: Path | None = None) -> list[Path]:
    """Build wheel and sdist of one package into ``out`` with fixed time stamps; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(source or of.folder)]
    before = set(out.iterdir())
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH})
    if done.returncode:
        raise SystemExit(f"building {of.name} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return sorted(set(out.iterdir()) - before)


def reproducible(names: tuple[str, ...], out: Path | None) -> list[str]:
    """Build each package from the tree and from a copy elsewhere with other file times; the archives that differ."""
    different = []
    for name in names:
        of = PACKAGES[name]
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "dist", "build")
            copy = Path(shutil.copytree(of.folder, home / "elsewhere" / name, ignore=ignore, copy_function=shutil.copy))
            # A copy of a folder that git ignores files in must leave out the same files.
            shutil.copy(ROOT / ".gitignore", copy.parent / ".gitignore")
            first, second = build(of, home / "first"), build(of, home / "second", copy)
            for a, b in zip(first, second, strict=True):
                same = _digest(a) == _digest(b) and a.name == b.name
                print(f"{'same' if same else 'DIFFERENT'}  {_digest(a)[:16]}  {a.name}")
                different += [] if same else [a.name]
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                for path in first:
                    shutil.copy(path, out / path.name)
    return different


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", help=", ".join(NAMES))
    parser.add_argument("version", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--reproducible", action="store_true", help="PACKAGE, if given, is where to put the archives")
    options = parser.parse_args(argv)
    if options.reproducible:
        out = Path(options.package) if options.package else None
        return 1 if reproducible(NAMES, out) else 0
    if not options.package:
        parser.error("name a package")
    of = package(options.package)
    if options.version and not options.check:
        release(of, options.version)
        return 0
    problems = check(of)
    print("\n".join(problems) or f"{of.name}: ready for a release after {of.version}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
