"""A call that a template writes into a conversation is read back as the same call, in each format."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.tool_calls.replies import read, split, tool
from tinsmith.chat.templates import chat_template
from tinsmith.chat.tool_calls.formats import Syntax

HERMES = chat_template("hermes")
CODER = (
    "{% for call in messages[0].tool_calls %}{{ '\\n' if not loop.first }}<tool_call>\n"
    "<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else (value | tojson if value is mapping or value is sequence else value | string) }}"
    "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
LLAMA = (
    "{% for call in messages[0].tool_calls %}{{ '; ' if not loop.first }}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
)
MISTRAL = (
    "[TOOL_CALLS][{% for call in messages[0].tool_calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}]'
)
MISTRAL_V11 = (
    "{% for call in messages[0].tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}"
)
TYPES: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"type": "string"}, st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    "maybe": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, st.sampled_from(["5", "true", "[1]", "", None])),
    "count": ({"type": "integer"}, st.integers()),
    "flag": ({"type": ["boolean", "null"]}, st.sampled_from([True, False, None])),
    "size": ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
    "items": ({"type": "array"}, st.lists(st.sampled_from(["</tool_call>", "`", 1, None, True]), max_size=3)),
    "level": ({"enum": ["high", 2, None]}, st.sampled_from(["high", 2, None])),
}
ARGUMENTS = st.fixed_dictionaries({}, optional={name: values for name, (_, values) in TYPES.items()})
TOOLS = (tool("first", **{name: schema for name, (schema, _) in TYPES.items()}), tool("second"))


def rendered(template: str, calls: list[dict[str, Any]]) -> str:
    """The assistant's message in a template, as the model writes it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in calls]}
    text = environment.from_string(template).render(messages=[message])
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


@pytest.mark.parametrize(
    ("form", "template"),
    [("tagged", HERMES), ("tagged", CODER), ("bare", LLAMA), ("mistral", MISTRAL), ("mistral", MISTRAL_V11)],
    ids=["hermes", "coder", "llama", "mistral", "mistral-v11"],
)
@settings(max_examples=30)
@given(
    calls=st.lists(st.builds(dict, name=st.just("first"), arguments=ARGUMENTS), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 500), max_size=4),
)
def test_rendered_calls_are_read_back(form: Syntax, template: str, calls: list[dict[str, Any]], cuts: list[int]):
    reply = rendered(template, calls)
    text, read_calls = read(form, *split(reply, cuts), tools=TOOLS)
    assert text == ""
    assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in read_calls] == calls
