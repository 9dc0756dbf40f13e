"""Schemas that no finite value fits are found; all others are let through."""

from typing import Any

import pytest

from k3_core.chat.finite import check_finite
from k3_core.errors import ChatError

LEAF: dict[str, Any] = {"type": "string"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
EMPTY: dict[str, tuple[dict[str, Any], str]] = {
    "itself": ({"$ref": "#"}, "#"),
    "two": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#"),
    "required": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
    "without type": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
    "optional": ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "#/properties/a"),
    "items": ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#"),
    "list": ({"type": "object", "properties": {"head": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}, "head"),
    "all": ({"allOf": [LEAF, {"$ref": "#"}]}, "#"),
    "every option": ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "#"),
    "inside an option": ({"anyOf": [LEAF, {"properties": {"a": {"$ref": "#/$defs/a"}}}],
                          "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/anyOf/properties/a"),
}  # fmt: skip
GOOD: dict[str, Any] = {
    "empty": {},
    "true": True,
    "none": None,
    "no value asked": {"type": "object", "properties": {"a": False}},
    "unknown reference": {"$ref": "#/$defs/absent"},
    "elsewhere": {"$ref": "https://example.org/schema"},
    "tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
             "required": ["children"]},
    "list with an end": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                         "required": ["next"]},
    "nullable": {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    "optional": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "an option that leads nowhere": {"anyOf": [{"$ref": "#"}, LEAF]},
    "an option whose definition leads nowhere": {"anyOf": [{"$ref": "#/$defs/a"}, LEAF],
                                                 "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "values": {"enum": [1], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "shared": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}},
               "required": ["a", "b"], "$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}]}, "y": LEAF}},
    "odd": {"properties": 5, "required": 7, "anyOf": {}, "allOf": 3, "type": [], "items": [LEAF], "minItems": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_a_schema_without_a_finite_value_is_refused(name: str) -> None:
    schema, place = EMPTY[name]
    with pytest.raises(ChatError, match="the wish: no finite value fits") as caught:
        check_finite(schema, "the wish")
    assert f"{place}, which" in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_other_schemas_are_let_through(name: str) -> None:
    check_finite(GOOD[name], "the wish")


def test_recursion_through_many_definitions_is_settled() -> None:
    """Each definition needs the next one; only the last has a value of its own."""
    chain: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d60": LEAF}}
    check_finite(schema, "the wish")
    schema["$defs"]["d60"] = {"$ref": "#/$defs/d0"}
    with pytest.raises(ChatError):
        check_finite(schema, "the wish")


def test_many_paths_cost_no_more_than_their_references() -> None:
    """Every definition offers all the others: as many paths as orders of them."""
    names = [f"d{i}" for i in range(60)]
    every = [{"$ref": f"#/$defs/{name}"} for name in names]
    schema: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": {name: {"anyOf": list(every)} for name in names}}
    with pytest.raises(ChatError):
        check_finite(schema, "the wish")
    schema["$defs"]["d59"]["anyOf"].append(LEAF)
    check_finite(schema, "the wish")
