"""Tool calls are parsed in each format, independent of chunking; other text stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.chat.tool_calls import ToolCall, ToolCallFormat, ToolCallParser, partial_match, tool_call_format
from tinsmith.errors import Unsupported

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1, "b": "é"}')
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    },
)


def read(form: ToolCallFormat, *pieces: str) -> tuple[str, list[ToolCall]]:
    reading, text, calls = ToolCallParser(form, TOOLS), "", []
    for piece in pieces:
        said, new_calls = reading.feed(piece)
        text, calls = text + said, calls + new_calls
    said, new_calls = reading.end()
    return text + said, calls + new_calls


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("tagged", "Just text.", "Just text.", []),
        ("tagged", CALL, "", [ADD]),
        ("tagged", f"Let me see.\n{CALL}", "Let me see.\n", [ADD]),
        ("tagged", f"\n{CALL}\n{CALL}\n", "", [ADD, ADD]),
        ("tagged", f"{CALL} and so on", " and so on", [ADD]),
        ("tagged", CALL.removesuffix("</tool_call>"), "", [ADD]),
        ("tagged", "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ("tagged", "<tool_call>{brok", "<tool_call>{brok", []),
        ("tagged", "a < b, <tool", "a < b, <tool", []),
        ("tagged", "\n", "\n", []),
        (
            "tagged",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            [ToolCall("add", '{"a": 1, "b": "2"}')],
        ),
        ("bare", '{"name": "add", "parameters": {"a": 1, "b": "é"}}', "", [ADD]),
        ("bare", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "é"}}', "", [ADD]),
        ("bare", '{"name": "add", "parameters": {}}; {"name": "sub", "parameters": {}}', "", None),
        ("bare", '{"answer": 42}', '{"answer": 42}', []),
        ("bare", "The set {1, 2}", "The set {1, 2}", []),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "é"}}]', "", [ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é"}', "", [ADD]),
        ("mistral", 'Well. [TOOL_CALLS]add{"a": 1, "b": "é"}', "Well. ", [ADD]),
        ("mistral", "[1, 2]", "[1, 2]", []),
    ],
)
def test_parses_each_format_whole_and_by_character(
    form: ToolCallFormat, text: str, said: str, calls: list[ToolCall] | None
):
    wanted = [ToolCall("add", "{}"), ToolCall("sub", "{}")] if calls is None else calls
    assert read(form, text) == (said, wanted)
    assert read(form, *text) == (said, wanted)


@given(
    st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "{", "}", " ", "\n", "word", "<"]), max_size=8),
    st.data(),
)
def test_parsing_does_not_depend_on_chunking(parts: list[str], data: st.DataObject):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read("tagged", *pieces) == read("tagged", text)


def test_call_arguments_are_json():
    (call,) = read("tagged", CALL)[1]
    assert json.loads(call.arguments) == {"a": 1, "b": "é"}


def test_tool_call_format_of_a_template():
    assert tool_call_format("{{ tools }} <tool_call>", "m") == "tagged"
    assert tool_call_format("{{ tools }} [TOOL_CALLS]", "m") == "mistral"
    assert tool_call_format('{{ tools }} {"name": function, "parameters": {}}', "m") == "bare"
    for template in ("{{ messages }}", "{{ tools }} somehow"):
        with pytest.raises(Unsupported, match="m "):
            tool_call_format(template, "m")


def test_partial_match_is_the_longest_possible_prefix():
    assert partial_match("abc<too", ("<tool_call>",)) == 4
    assert partial_match("abc<tool_call>", ("<tool_call>",)) == 0
    assert partial_match("aab", ("abX", "b!")) == 2
    assert partial_match("", ("x",)) == 0
