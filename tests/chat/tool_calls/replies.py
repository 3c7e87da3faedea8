"""Reading replies in the tests of this folder: tools, calls in each format, and a parser fed in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tinsmith.chat.tool_calls.formats import Syntax, ToolCallFormat
from tinsmith.chat.tool_calls.parser import ToolCallParser


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A declared function."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = (tool("add", a={"type": "integer"}, b={"type": "string"}), tool("sub"))


def read(
    form: Syntax | ToolCallFormat, *pieces: str, tools: Iterable[Any] = TOOLS
) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls as (name, arguments)) of a reply that arrives in these pieces."""
    form = form if isinstance(form, ToolCallFormat) else ToolCallFormat(form)
    parser, text, calls = ToolCallParser(form, tuple(tools)), "", []
    for piece in pieces:
        said, new_calls = parser.feed(piece)
        text, calls = text + said, calls + new_calls
    said, new_calls = parser.end()
    return text + said, [(call.name, call.arguments) for call in [*calls, *new_calls]]


def split(text: str, cuts: Iterable[int]) -> list[str]:
    """The text cut at these positions."""
    ends = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
