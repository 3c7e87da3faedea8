"""Tool calls are parsed in each format, independent of the pieces in which a reply arrives; other text stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.tool_calls.replies import read, split
from tinsmith.chat.tool_calls.formats import Syntax, ToolCallFormat, marker_texts, partial_match, tool_call_format
from tinsmith.errors import Unsupported

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ("add", '{"a": 1, "b": "é"}')
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("tagged", "Just text.", "Just text.", []),
        ("tagged", CALL, "", [ADD]),
        ("tagged", f"Let me see.\n{CALL}", "Let me see.\n", [ADD]),
        ("tagged", f"\n{CALL}\n{CALL}\n", "", [ADD, ADD]),
        ("tagged", f"{CALL} and so on", " and so on", [ADD]),
        ("tagged", CALL.removesuffix("</tool_call>"), "", [ADD]),
        ("tagged", CALL.removesuffix("call>"), "", [ADD]),
        ("tagged", "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ("tagged", "<tool_call>{brok", "<tool_call>{brok", []),
        ("tagged", "a < b, <tool", "a < b, <tool", []),
        ("tagged", "\n", "\n", []),
        ("tagged", XML, "", [("add", '{"a": 1, "b": "2"}')]),
        ("bare", '{"name": "add", "parameters": {"a": 1, "b": "é"}}', "", [ADD]),
        ("bare", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "é"}}', "", [ADD]),
        ("bare", '{"name": "add", "parameters": {}}; {"name": "sub", "parameters": {}}', "", None),
        ("bare", '{"type": "function", "name": "sub", "parameters": {}}', "", [("sub", "{}")]),
        ("bare", '{"answer": 42}', '{"answer": 42}', []),
        ("bare", "The set {1, 2}", "The set {1, 2}", []),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "é"}}]', "", [ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é"}', "", [ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]sub[ARGS]{}', "", None),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1, "b": "é"}', "", [ADD]),
        ("mistral", 'Well. [TOOL_CALLS]add{"a": 1, "b": "é"}', "Well. ", [ADD]),
        ("mistral", "[1, 2]", "[1, 2]", []),
    ],
)  # fmt: skip
def test_parses_each_format_whole_and_by_character(
    form: Syntax, text: str, said: str, calls: list[tuple[str, str]] | None
):
    wanted = [("add", "{}"), ("sub", "{}")] if calls is None else calls
    assert read(form, text) == (said, wanted)
    assert read(form, *text) == (said, wanted)


PIECES = {
    "tagged": [CALL, XML, "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {', "}}", "<function=add>",
               "<parameter=a>", "\n</parameter>\n", "</parameter>", "</function>"],
    "bare": ['{"name": "add", "parameters": {}}', '{"name": "no", "parameters": {}}', "<|python_tag|>", "; ", "{", "}"],
    "mistral": ['[TOOL_CALLS]add[ARGS]{"a": 1}', '[TOOL_CALLS][{"name": "add", "arguments": {}}]', "[TOOL_CALLS]",
                "[ARGS]", "[CALL_ID]", "add", "{", "}", "["],
}  # fmt: skip
PROSE = ["<think>", "</think>", "`", "```", "~~~", "> ", "\n", "\n\n", " ", "word ", '"', "\\", "<", "é", "[THINK]"]


@pytest.mark.parametrize("form", sorted(PIECES))
@given(data=st.data())
def test_parsing_does_not_depend_on_chunking(form: Syntax, data: st.DataObject):
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[form] + PROSE), max_size=14)))
    whole = read(form, text)
    assert read(form, *split(text, data.draw(st.lists(st.integers(0, 2000), max_size=8)))) == whole
    assert read(form, *text) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize("form", sorted(PIECES))
@given(data=st.data())
def test_text_and_calls_account_for_the_whole_reply(form: Syntax, data: st.DataObject):
    calls = {
        "tagged": '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>',
        "bare": '<|python_tag|>{{"name": "{}", "parameters": {{}}}}',
        "mistral": "[TOOL_CALLS]{}{{}}",
    }
    parts = data.draw(st.lists(st.sampled_from(["CALL", "word", *PROSE]), max_size=12))
    names = [f"tool_{number}" for number in range(len(parts))]
    pieces = [calls[form].format(names[at]) if part == "CALL" else part for at, part in enumerate(parts)]
    tools = [{"function": {"name": name}} for name in names]
    said, made = read(form, *pieces, tools=tools)
    called = {name for name, _ in made}
    rest = [piece for at, piece in enumerate(pieces) if names[at] not in called]
    assert [name for name, _ in made] == sorted(called, key=names.index)
    assert "".join(said.split()) == "".join("".join(rest).split()).replace(";" * bool(made), "")


@given(st.text(alphabet='<tool_call>/`{}":,a1[] \n', max_size=60))
def test_any_text_is_read_without_an_error(text: str):
    for form in ("tagged", "bare", "mistral"):
        assert read(form, text) == read(form, *text)


def test_reply_continues_reasoning_that_the_prompt_begins():
    form = tool_call_format("{{ tools }} <tool_call>", "m")
    reply = f"draft\n{CALL}\n</think>\n{CALL}"
    said = f"draft\n{CALL}\n</think>\n"
    assert read(form.after("<|im_start|>assistant\n<think>\n"), *reply) == (said, [ADD])
    assert read(form.after("assistant\n", "<think>I should"), *reply) == (said, [ADD])
    assert read(form.after("assistant\n<think>\n\n</think>\n\n"), CALL) == ("", [ADD])
    assert read(form.after("assistant\n", "<think>no</think>\n"), CALL) == ("", [ADD])


def test_format_of_a_template_with_its_reasoning_markers():
    assert tool_call_format("{{ tools }} <tool_call>", "m") == ToolCallFormat("tagged")
    assert tool_call_format("{{ tools }} [TOOL_CALLS]", "m").syntax == "mistral"
    assert tool_call_format('{{ tools }} {"name": function, "parameters": {}}', "m").syntax == "bare"
    declared = tool_call_format("{{ tools }} <tool_call> <long_think>{{ x }}</long_think>", "m")
    assert ("<long_think>", "</long_think>") in declared.thinking
    assert read(declared, f"<long_think>{CALL}</long_think>")[1] == []
    assert {"<tool_call>", "[THINK]", "</long_think>"} <= {*marker_texts(declared)}
    assert marker_texts(None) == ()


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }} somehow", "{{ tools }} <tool_call> <arg_key>"])
def test_unknown_formats_are_refused(template: str):
    with pytest.raises(Unsupported, match="m "):
        tool_call_format(template, "m")


def test_arguments_are_the_text_of_a_json_object():
    ((_, arguments),) = read("tagged", CALL)[1]
    assert json.loads(arguments) == {"a": 1, "b": "é"}


def test_partial_match_is_the_longest_possible_prefix():
    assert partial_match("abc<too", ("<tool_call>",)) == 4
    assert partial_match("abc<tool_call>", ("<tool_call>",)) == 0
    assert partial_match("aab", ("abX", "b!")) == 2
    assert partial_match("", ("x",)) == 0
