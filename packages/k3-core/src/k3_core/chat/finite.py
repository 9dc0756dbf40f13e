"""JSON schemas that no value fits because they refer to themselves without an end.

A grammar made of such a schema offers no token at all once it gets there, and the engine ends the request with an error
of the server. Here that is seen before: a schema *has a value* if a finite JSON value can fit it, the least fixed point
over its references. Only what surely has none is found; anything not understood counts as having one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from k3_core.errors import ChatError

Schema = Mapping[str, Any]


def check_finite(schema: Any, where: str) -> None:
    """Raises ChatError naming the first property or item of ``schema`` that no finite value fits.

    ``where`` is the option that holds the schema. Optional properties count too, since a grammar may begin one; an
    option of several (``anyOf``) may have no value. The work grows with the references, not with the paths over them.
    """
    parts, places = _collect(schema)
    asked_by: dict[int, list[int]] = {}
    for key, part in parts.items():
        for other in _looked_at(part, schema):
            asked_by.setdefault(id(other), []).append(key)
    fitting: set[int] = set()
    waiting = list(parts)
    while waiting:
        key = waiting.pop()
        if key not in fitting and _fits(parts[key], schema, fitting):
            fitting.add(key)
            waiting += asked_by.get(key, [])
    for key, place in places.items():
        if key not in fitting:
            raise ChatError(
                f"{where}: no finite value fits the schema at {place}, which refers to itself without an end"
            )


def resolve(reference: Any, root: Any) -> Schema | None:
    """The part of ``root`` that a reference such as ``#/$defs/node`` names; None where it names none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for step in filter(None, reference[1:].split("/")):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else None


def _collect(root: Any) -> tuple[dict[int, Schema], dict[int, str]]:
    """All parts by identity, and the places of those that must have a value: the root, properties and items."""
    parts: dict[int, Schema] = {}
    places: dict[int, str] = {}
    waiting: list[tuple[Any, str, bool]] = [(root, "#", True)]
    while waiting:
        part, place, needed = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        if needed:
            places.setdefault(id(part), place)
        if id(part) in parts:
            continue
        parts[id(part)] = part
        inner = [(part.get(key), f"{place}/{key}", True) for key in ("items", "additionalProperties")]
        inner += [(value, f"{place}/properties/{name}", True) for name, value in _properties(part).items()]
        inner += [(option, f"{place}/{key}", False) for key in _COMBINED for option in _options(part, key)]
        inner.append((resolve(part.get("$ref"), root), str(part.get("$ref")), False))
        waiting += reversed(inner)
    return parts, places


_COMBINED = ("anyOf", "oneOf", "allOf")


def _properties(part: Schema) -> Schema:
    properties = part.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _options(part: Schema, key: str) -> list[Any]:
    options = part.get(key)
    return options if isinstance(options, list) else []


def _needed(part: Schema) -> list[Any]:
    """The schemas of the required properties."""
    required = part.get("required")
    names = required if isinstance(required, list) else []
    return [_properties(part).get(name) for name in names if isinstance(name, str)]


def _looked_at(part: Schema, root: Any) -> Iterator[Any]:
    """Every part that :func:`_fits` may ask about."""
    yield resolve(part.get("$ref"), root)
    for key in _COMBINED:
        yield from _options(part, key)
    yield from _needed(part)
    yield part.get("items")


def _fits(part: Schema, root: Any, fitting: set[int]) -> bool:
    """Whether a value for ``part`` can be made of parts that have one already."""

    def has(other: Any) -> bool:
        return not isinstance(other, Mapping) or id(other) in fitting

    if not has(resolve(part.get("$ref"), root)):
        return False
    if "const" in part or "enum" in part:
        return True
    for key in ("anyOf", "oneOf"):
        options = _options(part, key)
        if options and not any(map(has, options)):
            return False
    if not all(map(has, _options(part, "allOf"))):
        return False
    declared = part.get("type", "object" if "properties" in part else None)
    for kind in declared if isinstance(declared, list) and declared else [declared]:
        least = part.get("minItems")
        filled = kind == "array" and isinstance(least, int) and least > 0
        if all(map(has, _needed(part))) if kind == "object" else not filled or has(part.get("items")):
            return True
    return False
