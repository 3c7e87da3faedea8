"""Convert messages and tools of the OpenAI API to the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.chat.strict_json import parse_json
from tinsmith.errors import BadRequest, Unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """Tools to render into the prompt; none for tool_choice "none". Raises BadRequest or Unsupported."""
    for number, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{number}] is not a function with a name.", "Send {type, function}.", field="tools")
    if choice not in ("auto", "none"):
        message = "tool_choice must be 'auto' or 'none'."
        raise Unsupported(message, "Request the tool call in the prompt.", field="tool_choice")
    return [] if choice == "none" else [dict(tool) for tool in tools]


def parse_messages(
    messages: Sequence[Mapping[str, Any]], *, developer_role: bool, images: list[str] | None = None
) -> list[dict[str, Any]]:
    """Messages for a chat template; without `developer_role`, developer messages become system messages.

    The URLs of images are added to `images`; None refuses images. Tool results get the name of the called function,
    which the API omits and some templates read. Raises BadRequest or Unsupported.
    """
    parsed = [_message(number, message, developer_role, images) for number, message in enumerate(messages)]
    names = {
        call.get("id"): call["function"].get("name") for message in parsed for call in message.get("tool_calls", ())
    }
    for message in parsed:
        name = names.get(message.get("tool_call_id"))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)
    return parsed


def _message(number: int, message: Mapping[str, Any], developer_role: bool, images: list[str] | None) -> dict[str, Any]:
    where, role = f"messages[{number}]", message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role is {role!r}.", f"Send one of {', '.join(_ROLES)}.", field=f"{where}.role")
    parsed = {
        key: value for key, value in message.items() if value is not None and key not in ("content", "tool_calls")
    }
    for key in ("name", "tool_call_id"):
        _check_text(f"{where}.{key}", parsed.get(key, ""))
    parsed["role"] = "system" if role == "developer" and not developer_role else role
    parsed["content"] = _content(f"{where}.content", message.get("content"), images)
    if calls := message.get("tool_calls"):
        parsed["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return parsed


def _content(where: str, content: Any, images: list[str] | None) -> str | list[dict[str, str]]:
    """Message content as text or as parts; the template's form is determined when they are rendered."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} is neither text nor a list of parts.", "Send a string.", field=where)
    parts = []
    for part in content:
        kind = _kind(part)
        if kind == "image_url" and images is not None:
            images.append(_url(where, part["image_url"]))
            parts.append({"type": "image"})
        elif kind in ("text", "refusal") and isinstance(part.get(kind), str):
            parts.append({"type": "text", "text": part[kind]})
        else:
            raise Unsupported(f"{where} holds a part of type {kind}.", "Send text parts only.", field=where)
    return parts


def _url(where: str, image: Any) -> str:
    image = {"url": image} if isinstance(image, str) else image
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        raise BadRequest(f"{where} holds an image_url without url.", "Send {url}.", field=where)
    if image.get("detail") not in (None, "auto"):
        raise Unsupported(
            f"{where} holds an image_url with detail {image['detail']!r}.", "Resize the image instead.", field=where
        )
    return str(image["url"])


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: the API sends JSON text, templates read objects."""
    parsed = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequest(
                f"{where} holds an entry that is not a function call.", "Send {id, type, function}.", field=where
            )
        place = f"{where}[{number}]"
        _check_text(f"{place}.id", call.get("id") or "")
        _check_text(f"{place}.function.name", function.get("name"))
        arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _check_text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise BadRequest(f"{where} is not text.", "Send a string.", field=where)


def _arguments(where: str, arguments: Any) -> Any:
    """Arguments as an object; text that is not JSON at all stays text. Raises BadRequest."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return parse_json(arguments or "{}")
    except json.JSONDecodeError:
        return arguments
    except ValueError as error:
        raise BadRequest(f"{where} is not JSON: {error}.", "Send the arguments as JSON text.", field=where) from error
