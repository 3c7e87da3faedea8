"""Items of the Responses API: the input's as chat messages, and those of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.chat.tool_calls.arguments import ToolCall
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.openai.requests import new_id

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a content part -> its field with the text."""


def chat_messages(instructions: str | None, items: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The conversation as chat messages. Calls of one turn, and the text before them, are one message.

    Raises BadRequest or Unsupported with the item's place.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise BadRequest(f"{where} is not an item.", "Send objects with a type.", field=where)
        message = _message(where, item)
        previous = messages[-1] if messages else {}
        if "tool_calls" in message and previous.get("role") == "assistant":
            previous.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _text(f"{where}.content", item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        text = _text(f"{where}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    raise Unsupported(
        f"{where} is of type {kind}.", "Send message, function_call and function_call_output only.", field=where
    )


def _text(where: str, content: Any) -> str:
    """Content as text; parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} is neither text nor a list of parts.", "Send a string.", field=where)
    lines = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_PARTS.get(str(kind), "")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise Unsupported(f"{where} holds a part of type {kind}.", "Send text parts only.", field=where)
        lines.append(text)
    return "\n".join(lines)


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat completions name them. Raises Unsupported for tools that are not functions."""
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            where = f"tools[{number}]"
            raise Unsupported(f"{where} is of type {tool.get('type')}.", "Send functions only.", field=where)
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} for tool in tools
    ]


def text_part(text: str) -> dict[str, Any]:
    """Content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """A message; one that is in progress has no content yet."""
    content = [] if status == "in_progress" else [text_part(text)]
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def call_item(call: ToolCall) -> dict[str, Any]:
    """A complete function call with new ids."""
    made = call.to_json()
    return {
        "type": "function_call",
        "id": new_id("fc"),
        "call_id": made["id"],
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
