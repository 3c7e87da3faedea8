"""Parameters in tags become values of the tool's schema."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.chat.tool_calls.schemas import ParameterTypes

S, N, I, F, B = ({"type": name} for name in ("string", "null", "integer", "number", "boolean"))  # noqa: E741
A, O = {"type": "array"}, {"type": "object"}  # noqa: E741
DEFS = {
    "Level": {"enum": [1, 2, "high"]},
    "Node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "integer"}, {"type": "string"}]},
    "Only": {"$ref": "#/$defs/Only"},
    "Left": {"$ref": "#/$defs/Right"},
    "Right": {"$ref": "#/$defs/Left"},
    "Point": {"properties": {"x": I}},
}


def value(schema: Any, text: str) -> Any:
    """The value of a parameter with this schema."""
    return ParameterTypes({"type": "object", "properties": {"p": schema}, "$defs": DEFS}).value("p", text)


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        (S, "5", "5"), (S, "null", "null"), (S, "True", "True"), (S, '["a"]', '["a"]'), (S, "", ""),
        ({"anyOf": [S, N]}, "12345", "12345"), ({"anyOf": [N, S]}, "12345", "12345"),
        ({"anyOf": [S, N]}, "null", None), ({"anyOf": [S, N]}, "None", None), ({"anyOf": [S, N]}, "none", "none"),
        ({"type": ["string", "null"]}, "98765", "98765"), ({"type": ["null", "string"]}, "None", None),
        ({"oneOf": [S, N]}, "1e5", "1e5"), ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "7", "7"), (N, "null", None), (N, "x", "x"),
        (B, "True", True), (B, "false", False), (B, "FALSE", False), (B, "1", True), (B, "0", False), (B, "yes", "yes"),
        ({"type": ["boolean", "null"]}, "False", False), ({"anyOf": [B, N]}, "None", None),
        ({"anyOf": [B, I]}, "1", 1), ({"anyOf": [B, I]}, "true", True), ({"anyOf": [B, S]}, "True", True),
        (I, "2", 2), (I, " -3 ", -3), (I, "+4", 4), (I, "2.0", 2), (I, "2.5", "2.5"), (I, "1_000", "1_000"),
        (I, "null", "null"), (I, "9" * 5000, "9" * 5000), ({"anyOf": [I, N]}, "null", None),
        (F, "2", 2), (F, "2.5", 2.5), (F, ".5", 0.5), (F, "1e3", 1000.0), (F, "1e999", "1e999"), (F, "NaN", "NaN"),
        (F, "inf", "inf"), ({"type": ["number", "string"]}, "5", 5), ({"type": ["string", "number"]}, "5", "5"),
        ({"anyOf": [I, S]}, "5", 5), ({"anyOf": [I, S]}, "5a", "5a"),
        (A, "[1, 2]", [1, 2]), (A, "['a', True, None, 'it\\'s \"q\"']", ["a", True, None, 'it\'s "q"']),
        (A, "(1, 2,)", [1, 2]), (A, "a, b", "a, b"), (A, '{"a": 1}', '{"a": 1}'), (A, "[" * 5000, "[" * 5000),
        ({"type": "array", "items": S}, '["1"]', ["1"]), ({"items": I}, "[1]", [1]), (A, "[NaN]", "[NaN]"),
        (O, '{"a": [1]}', {"a": [1]}), (O, "{'a': {'b': False}}", {"a": {"b": False}}), (O, "[1]", "[1]"),
        ({"anyOf": [S, A]}, '["a"]', ["a"]), ({"anyOf": [S, A]}, "a", "a"), ({"anyOf": [A, N]}, "null", None),
        ({"enum": ["a", "b"]}, "a", "a"), ({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a", 1, True, None]}, "True", True), ({"enum": ["a", None]}, "None", None),
        ({"enum": ["1", 1]}, "1", "1"), ({"enum": [1, 2]}, "3", "3"), ({"type": "string", "enum": ["5"]}, "5", "5"),
        ({"enum": [{"a": 1}]}, '{"a": 1}', {"a": 1}), ({"const": 5}, "5", 5), ({"const": True}, "True", True),
        ({"const": "5"}, "5", "5"), ({"$ref": "#/$defs/Level"}, "2", 2), ({"$ref": "#/$defs/Level"}, "high", "high"),
        ({"anyOf": [{"$ref": "#/$defs/Level"}, N]}, "None", None), ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Level"}], "description": "d"}, "1", 1), ({"allOf": [F, I]}, "2", 2),
        ({"$ref": "#/$defs/Node"}, "3", 3), ({"$ref": "#/$defs/Node"}, "x", "x"), ({"$ref": "#/$defs/Only"}, "x", "x"),
        ({"$ref": "#/$defs/Left"}, "1", "1"), ({"$ref": "#/$defs/None"}, "1", 1), ({"$ref": "http://x/y"}, "1", 1),
        ({"$ref": "#/properties/p"}, "1", "1"), ({"type": "str"}, "5", "5"), ({"type": "Bool"}, "True", True),
        ({}, "5", 5), ({}, "true", True), ({}, "abc", "abc"), ({}, "True", "True"), ({}, '{"a": 1}', {"a": 1}),
        (True, "[1]", [1]), (None, "1", 1), ({"type": []}, "1", 1), ({"type": 5}, "1", 1), ({"enum": "ab"}, "a", "a"),
        ({"anyOf": "x"}, "1", 1), ({"anyOf": []}, "1", 1), ({"type": "any"}, "1", "1"),
    ],
)  # fmt: skip
def test_value_follows_the_schema(schema: Any, text: str, wanted: Any):
    read = value(schema, text)
    assert read == wanted
    assert type(read) is type(wanted)


def test_properties_are_read_through_references():
    schema = {
        "$ref": "#/$defs/Body",
        "$defs": {"Body": {"allOf": [{"properties": {"p": S}}, {"$ref": "#/$defs/Body"}]}},
    }
    assert ParameterTypes(schema).value("p", "5") == "5"
    for nothing in (None, [], {"properties": []}, {"properties": {"q": S}}, {"$ref": "#"}):
        assert ParameterTypes(nothing).value("p", "5") == 5


def test_schemas_that_multiply_are_read_in_part():
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 10} for n in range(20)}
    assert ParameterTypes({"properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": defs}).value("p", "x") == "x"


SCHEMAS = st.recursive(
    st.sampled_from(
        [S, N, I, F, B, A, O, {}, True, None, {"enum": [1, "a", None]}, {"$ref": "#/$defs/Node"}, {"const": []}]
    ),
    lambda part: st.fixed_dictionaries(
        {}, optional={key: st.lists(part, max_size=3) for key in ("anyOf", "oneOf", "allOf", "enum", "type")}
    ),
    max_leaves=8,
)


@given(SCHEMAS, st.one_of(st.text(max_size=12), st.text("0123456789+-.eE[]{}'\",:NoneTruefals ", max_size=12)))
def test_any_schema_and_text_give_a_json_value(schema: Any, text: str):
    if (read := value(schema, text)) != text:
        assert isinstance(read, dict | list | int | float | bool | None)
