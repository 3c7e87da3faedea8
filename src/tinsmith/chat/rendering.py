"""Render conversations with a model's chat template.

Templates take the content of a message as text or as a list of parts (`{type: text, text: …}`); most take text, some
both, and some only parts: with text they write nothing. The form is determined for each role by rendering a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tinsmith.errors import BadRequest

Messages = Sequence[Mapping[str, Any]]

_PROBE = "tinsmith"
_CONTINUED = "\ue000continued\ue001"
"""Marks the end of an empty message that the reply continues: private-use characters that no text contains."""
_LONG = 16
"""Characters of a text that a template does not hold by chance."""
_CALL = {"id": "000000000", "type": "function", "function": {"name": "probe", "arguments": {}}}


def render_template(
    tokenizer: Any,
    messages: Messages,
    tools: Messages | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    values: Mapping[str, Any],
    template: str | None = None,
    owner: str = "",
) -> str:
    """Render a conversation with the chat template of a transformers tokenizer, or with `template` in its place.

    Raises BadRequest if the template rejects the messages, or leaves out the user's text or the last message; `owner`
    names the template's model in the error.
    """
    from jinja2 import TemplateError

    def render(messages: Messages, continues: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                in_form(tokenizer, template, messages, tools),
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continues,
                tokenize=False,
                **values,
            )
        )

    def render_whole(messages: Messages) -> str:
        if continue_final_message and not content_text(messages[-1].get("content")).strip():
            return _render_continued(render, messages)
        return render(messages, continue_final_message)

    try:
        text = render_whole(messages)
        missing = _missing_text(render_whole, messages, text)
    except (TemplateError, ValueError, TypeError) as error:
        raise BadRequest(
            f"The chat template{owner} does not accept these messages: {error}", "Change the messages or the template."
        ) from error
    if missing:
        raise BadRequest(
            f"The chat template{owner} leaves out the text of {missing}.",
            "Use a model or a template that takes these messages, or send a prompt instead of a chat.",
            field="messages",
        )
    return text


def in_form(
    tokenizer: Any, template: str | None, messages: Messages, tools: Messages | None = None
) -> list[dict[str, Any]]:
    """Messages with their content as the template takes it; lists with images stay lists."""
    source = tokenizer.get_chat_template(template, tools=[dict(tool) for tool in tools] if tools else None)
    tokens = tuple((name, str(token)) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str))
    return [
        {**message, "content": _in_form(message["content"], takes_parts(source, str(message.get("role")), tokens))}
        if message.get("content") is not None
        else dict(message)
        for message in messages
    ]


@lru_cache(maxsize=512)
def takes_parts(template: str, role: str, special_tokens: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether a chat template writes the content of messages of this role only if it is a list of parts."""
    others = role != "user" and takes_parts(template, "user", special_tokens)
    probe = {"role": role, "content": _in_form(_PROBE, False)}

    def writes(is_list: bool) -> bool:
        first = {"role": "user", "content": _in_form("x", others)}
        call = {"role": "assistant", "content": _in_form("", others), "tool_calls": [_CALL]}
        probe["content"] = _in_form(_PROBE, is_list)
        before = {"assistant": [first], "tool": [first, call]}.get(role, [])
        return _writes_probe(template, [*before, probe, *([first] if role == "system" else [])], special_tokens)

    return not writes(False) and writes(True)


def content_text(content: str | Messages | None) -> str:
    """The text of a message's content, its parts joined by line breaks."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _in_form(content: Any, is_list: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if is_list else content
    if is_list or any(part.get("type") != "text" for part in content):
        return [dict(part) for part in content] or [{"type": "text", "text": ""}]
    return content_text(content)


def _writes_probe(template: str, messages: Messages, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = dict(special_tokens)
    try:
        texts, _ = render_jinja_template([[dict(message) for message in messages]], chat_template=template, **variables)
    except (TemplateError, ValueError, TypeError):
        return False
    return _PROBE in texts[0].lower()


def _render_continued(render: Callable[[Messages, bool], str], messages: Messages) -> str:
    """The text up to the content of the final message, which is empty: with the space that the template writes."""
    *before, last = messages
    content = last.get("content") or ""
    marked = content + _CONTINUED if isinstance(content, str) else [*content, {"type": "text", "text": _CONTINUED}]
    text, mark, _ = render([*before, {**last, "content": marked}], False).rpartition(_CONTINUED)
    if not mark:
        raise ValueError("the template leaves out the final message, which is to be continued")
    return text


def _missing_text(render: Callable[[Messages], str], messages: Messages, text: str) -> str:
    """What the rendered text holds nothing of: the user's messages or the last one; empty if it holds them.

    A template may change a text (space, case, JSON), but another text then gives another prompt.
    """
    last = len(messages) - 1
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    ends = [last] if messages[last].get("role") in ("user", "tool") else []
    for name, places in (("the user's messages", users), ("the last message", ends)):
        texts = [content_text(messages[at].get("content")).strip() for at in places]
        if not any(texts) or any(len(said) >= _LONG and said in text for said in texts):
            continue
        changed = [_with_text(message) if at in places else message for at, message in enumerate(messages)]
        try:
            if render(changed) == text:
                return name
        except Exception:  # noqa: BLE001  the template reads the text, so that another one is an error
            continue
    return ""


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with other texts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + _PROBE}
    return {
        **message,
        "content": [
            {**part, "text": part["text"] + _PROBE} if part.get("type") == "text" else part for part in content
        ],
    }
