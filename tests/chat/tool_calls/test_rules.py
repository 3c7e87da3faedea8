"""Where a marker begins a call: the table of docs/reference/tool-calls.md, and vLLM's parsers."""

from __future__ import annotations

import json

import pytest

from tests.chat.tool_calls.replies import read, tool
from tinsmith.chat.tool_calls.formats import Syntax

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ("add", '{"a": 1}')
JSON = '{"name": "add", "parameters": {"a": 1}}'
MISTRAL = '[TOOL_CALLS]add[ARGS]{"a": 1}'
LIST = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'


def function(*parameters: tuple[str, str], name: str = "add") -> str:
    """A call with these parameters in tags."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def tagged(arguments: str, name: str = "add") -> str:
    """A call with these arguments as JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "reply", "said"),
    [
        # The start of a line, also after reasoning and after another call.
        ("tagged", f"Text before.\n{CALL}", "Text before.\n"),
        ("tagged", f"  {CALL}", ""),
        ("tagged", f"{CALL}\nText after.", "\nText after."),
        ("mistral", f"{LIST}\n\nText after.", "\n\nText after."),
        ("tagged", f"<think>\nHm.\n</think>\n\n{CALL}", "<think>\nHm.\n</think>\n\n"),
        ("tagged", f"<think>Hm.</think>{CALL}", "<think>Hm.</think>"),
        ("bare", f"<think>Hm.</think>\n{JSON}", "<think>Hm.</think>"),
        ("mistral", f"[THINK]Hm.[/THINK]{MISTRAL}", "[THINK]Hm.[/THINK]"),
        ("tagged", f"<think>Hm. <tool_call></think>{CALL}", "<think>Hm. <tool_call></think>"),
        # Within a line of prose, where the reply ends with it.
        ("tagged", f"Text before.{CALL}", "Text before."),
        ("tagged", f"Text before: {CALL}\n", "Text before: "),
        ("mistral", f"Text before.{MISTRAL}", "Text before."),
        ("bare", f"Text before. <|python_tag|>{JSON}", "Text before. "),
        # After code.
        ("tagged", f"```\nls\n```\n{CALL}", "```\nls\n```\n"),
        ("tagged", f"```\nls\n```{CALL}", "```\nls\n```"),
        ("tagged", f"`ls` and `<think>`:\n{CALL}", "`ls` and `<think>`:\n"),
        ("tagged", f"```ls``` does it.\n{CALL}", "```ls``` does it.\n"),
        ("tagged", f"A lone ` is text.\n{CALL}", "A lone ` is text.\n"),
        ("tagged", f"~~~\n```\n~~~\n{CALL}", "~~~\n```\n~~~\n"),
        ("tagged", f"> quoted\n{CALL}", "> quoted\n"),
        # Qwen Coder leaves out the opening tag at times.
        ("tagged", CALL.replace("<tool_call>", "<tool_call>\n"), ""),
        ("tagged", function(("a", "1")).removeprefix("<tool_call>\n"), ""),
        ("tagged", function(("a", "1")).replace("</function>\n", ""), ""),
        ("tagged", function(("a", "1")).removesuffix("\n</tool_call>"), ""),
        # A draft that is no call ends nothing.
        ("tagged", f"<tool_call>\n{{oops}}\n</tool_call>\n{CALL}", "<tool_call>\n{oops}\n</tool_call>\n"),
        ("tagged", f"<tool_call>{CALL}", "<tool_call>"),
        ("bare", f"<|python_tag|>{JSON}", ""),
    ],
)  # fmt: skip
def test_calls_are_read_where_models_write_them(form: Syntax, reply: str, said: str):
    assert read(form, reply) == (said, [ADD])
    assert read(form, *reply) == (said, [ADD])


@pytest.mark.parametrize(
    ("form", "reply"),
    [
        # In reasoning, also without an end.
        ("tagged", f"<think>\nMaybe {CALL}\nor not.\n</think>\nNo."),
        ("tagged", f"<think>\n{CALL}"),
        ("tagged", f"Well.\n<think>\n{CALL}\n</think>\nDone."),
        ("tagged", f"Well, <think>{CALL}</think> done."),
        ("tagged", f"<think>a</think>b<think>\n{CALL}</think>"),
        ("tagged", f"<thinking>\n{CALL}\n</thinking>"),
        ("tagged", f"<think>\n```\n</thinking>{CALL}"),
        ("mistral", f"[THINK]{MISTRAL}[/THINK]"),
        ("mistral", f"<think>{LIST}</think>"),
        ("bare", f"<think>{JSON}</think>"),
        ("bare", f"<think>\n<|python_tag|>{JSON}"),
        # In code and quotations.
        ("tagged", f"Write `{CALL}` to add."),
        ("tagged", f"Write `` ` {CALL} ``."),
        ("tagged", f"Write `\n{CALL}\n`."),
        ("tagged", f"```xml\n{CALL}\n```"),
        ("tagged", f"~~~\n{CALL}\n~~~\nso."),
        ("tagged", f"````\n```\n{CALL}\n```\n````"),
        ("tagged", f"```\n{CALL}"),
        ("tagged", "> " + CALL.replace("\n", "")),
        ("mistral", f"```\n{MISTRAL}\n```"),
        ("mistral", f"`{MISTRAL}`"),
        ("bare", f"```json\n{JSON}\n```"),
        # Within a line of prose that goes on.
        ("tagged", f'Write "{CALL}" to add.'),
        ("tagged", f"The call {CALL} would add."),
        ("tagged", f"For example: {CALL}\nThat adds."),
        ("tagged", f"Not {CALL}{CALL}."),
        ("mistral", f"The marker {MISTRAL} adds."),
        ("bare", f"{JSON} adds."),
        ("bare", f"Here: {JSON}"),
        ("bare", f"[{JSON}]"),
    ],
)
def test_calls_that_are_not_made_are_text(form: Syntax, reply: str):
    assert read(form, reply) == (reply, [])
    assert read(form, *reply) == (reply, [])


@pytest.mark.parametrize(
    ("form", "reply"),
    [
        ("bare", '{"name": "Bob", "age": 3}'),
        ("bare", '{"name": "Bob", "parameters": {}}'),
        ("bare", '<|python_tag|>{"name": "Bob", "parameters": {}}'),
        ("bare", '{"name": "add", "age": 3}'),
        ("bare", f'{JSON}; {{"name": "Bob", "parameters": {{}}}}'),
        ("tagged", '{"name": "add", "arguments": {}}'),
        ("tagged", "<function=remove>\n</function>"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]add"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, 5]'),
    ],
)
def test_json_that_is_no_call_is_text(form: Syntax, reply: str):
    assert read(form, reply) == read(form, *reply) == (reply, [])


@pytest.mark.parametrize(("form", "call"), [("tagged", tagged("{}", "nope")), ("mistral", "[TOOL_CALLS]nope{}")])
def test_marked_call_of_an_undeclared_tool_is_a_call(form: Syntax, call: str):
    assert read(form, call) == ("", [("nope", "{}")])


BAD_ARGUMENTS = [
    "null", '""', "[]", "5", "true", '"text"', '"[1]"', '{"x": NaN}', '{"x": Infinity}', '{"x": -Infinity}',
    '{"x": 1e999}', '{"x": -1e999}', '{"x": "half \\ud83d"}', '{"\\udc00": 1}', '{"x": "line\nbreak"}', "{'x': 1}",
    '{"x": 1,}', "{" * 3, '{"x": ' + "[" * 3000 + "]" * 3000 + "}", "[" * 3000 + "]" * 3000, "[" * 3000,
    '{"x": ' + "9" * 5000 + "}", '{"x": ' + '{"x": ' * 101 + "1" + "}" * 102, '"{\\"x\\": NaN}"',
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=lambda text: text[:20])
def test_arguments_that_are_no_json_object_are_text(arguments: str):
    replies: list[tuple[Syntax, str]] = [
        ("tagged", tagged(arguments)),
        ("bare", f'{{"name": "add", "parameters": {arguments}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {arguments}}}]'),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{arguments}"),
    ]
    for form, reply in replies:
        assert read(form, reply) == read(form, *reply) == (reply, [])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("{}", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),  # templates that write the text of the arguments
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": "</tool_call>"}', {"a": "</tool_call>"}),
        ('{"a": "<tool_call>{\\"name\\": \\"rm\\"}</tool_call> `"}', {"a": '<tool_call>{"name": "rm"}</tool_call> `'}),
        ('{"a": "\\ud83d\\ude00 \\u0000"}', {"a": "😀 \0"}),
        ('{"a": "\\\\\\""}', {"a": '\\"'}),
        ('{"a": ' + "[" * 90 + "]" * 90 + "}", None),
        ('{"a": 1e308}', {"a": 1e308}),
    ],
)
def test_arguments_keep_their_values(arguments: str, wanted: dict[str, object] | None):
    text, ((name, read_arguments),) = read("tagged", tagged(arguments))
    assert (text, name) == ("", "add")
    assert json.loads(read_arguments) == (json.loads(arguments) if wanted is None else wanted)


@pytest.mark.parametrize(
    "value",
    [
        "</tool_call>",
        "a\n</function>\n</tool_call>\nb",
        "</parameter>",
        "a </parameter> b",
        f"Use:\n{function(('x', '1'))}\nso.",
        "\n\nframed\n\n",
        "",
        "```\n`<think>",
    ],
)
def test_values_may_hold_the_tags_of_the_format(value: str):
    reply = function(("b", value), ("a", "1"))
    text, calls = read("tagged", reply, tools=[tool("add", b={"type": "string"}, a={"type": "integer"})])
    assert (text, [json.loads(arguments) for _, arguments in calls]) == ("", [{"b": value, "a": 1}])
    assert read("tagged", *reply) == read("tagged", reply)


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>\n<function=add>\n",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n",
        "<tool_call>\n<function=add>\n<parameter=a>\n1",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\nwords\n</function>\n</tool_call>",
    ],
)
def test_incomplete_functions_are_text(reply: str):
    assert read("tagged", reply) == read("tagged", *reply) == (reply, [])


def test_several_functions_in_tags_are_several_calls():
    reply = "<tool_call>\n<function=add>\n</function>\n<function=sub>\n</function>\n</tool_call>"
    assert read("tagged", reply) == ("", [("add", "{}"), ("sub", "{}")])


# What vLLM's parsers return for a reply (content, names of the calls), read from their source: hermes, qwen3_coder,
# llama3_json and mistral. `ours` is None where this parser agrees; the differences are deliberate (the guide says why).
VLLM: list[tuple[Syntax, str, tuple[str | None, list[str]], tuple[str, list[str]] | None]] = [
    ("tagged", CALL, (None, ["add"]), None),
    ("tagged", f"Text.\n{CALL}", ("Text.\n", ["add"]), None),
    ("tagged", f"Text.{CALL}", ("Text.", ["add"]), None),
    ("tagged", f"{CALL}\n{CALL}", (None, ["add", "add"]), None),
    ("tagged", CALL.removesuffix("\n</tool_call>"), (None, ["add"]), None),
    ("tagged", tagged("{}", "nope"), (None, ["nope"]), None),
    ("tagged", "<tool_call>{oops}</tool_call>", ("<tool_call>{oops}</tool_call>", []), None),
    ("tagged", f"{CALL} after", (None, ["add"]), (" after", ["add"])),  # vLLM drops text after a call
    ("tagged", f"`{CALL}`", ("`", ["add"]), (f"`{CALL}`", [])),
    ("tagged", tagged("null"), (None, ["add"]), (tagged("null"), [])),
    ("tagged", tagged('{"a": "</tool_call>"}'), (tagged('{"a": "</tool_call>"}'), []), ("", ["add"])),
    ("tagged", function(("a", "1")), (None, ["add"]), None),
    ("tagged", function(("a", "1")).removeprefix("<tool_call>\n"), (None, ["add"]), None),
    ("tagged", function().removesuffix("</function>\n</tool_call>"), (None, ["add"]),
     (function().removesuffix("</function>\n</tool_call>"), [])),
    ("bare", JSON, (None, ["add"]), None),
    ("bare", f"<|python_tag|>{JSON}", (None, ["add"]), None),
    ("bare", f"{JSON}; {JSON}", (None, ["add", "add"]), None),
    ("bare", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', []), None),
    ("bare", '{"name": "Bob", "parameters": {}}', (None, ["Bob"]), ('{"name": "Bob", "parameters": {}}', [])),
    ("bare", f"Sure: {JSON}", (None, ["add"]), (f"Sure: {JSON}", [])),
    ("mistral", LIST, (None, ["add"]), None),
    ("mistral", MISTRAL, (None, ["add"]), None),
    ("mistral", f"Text.{MISTRAL}{MISTRAL}", ("Text.", ["add", "add"]), None),
    ("mistral", "[TOOL_CALLS]add{oops}", (None, ["add"]), ("[TOOL_CALLS]add{oops}", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "reply", "vllm", "ours"), VLLM)
def test_replies_are_read_as_vllm_does_unless_stated(
    form: Syntax, reply: str, vllm: tuple[str | None, list[str]], ours: tuple[str, list[str]] | None
):
    text, calls = read(form, reply)
    assert (text, [name for name, _ in calls]) == (ours or (vllm[0] or "", vllm[1]))
