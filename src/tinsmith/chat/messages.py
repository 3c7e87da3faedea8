"""Chat messages as OpenAI's dialect sends them -> as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.errors import BadRequest, Unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")


def plain_tools(given: Sequence[Mapping[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools that the model is told of. Raises BadRequest or Unsupported."""
    for number, tool in enumerate(given):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{number}] is no function with a name.", "Send {type, function}.")
    if choice not in ("auto", "none"):
        raise Unsupported(
            "A tool_choice other than 'auto' and 'none' is not served here.", "Ask for the call in the prompt."
        )
    return [] if choice == "none" else [dict(tool) for tool in given]


def plain_messages(given: Sequence[Mapping[str, Any]], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Answers of tools get the name of what was called, which the API leaves out and some templates want."""
    made = [_message(number, one, knows_developer) for number, one in enumerate(given)]
    names = {call.get("id"): call["function"].get("name") for one in made for call in one.get("tool_calls", ())}
    for one in made:
        called = names.get(one.get("tool_call_id"))
        if one["role"] == "tool" and called is not None:
            one.setdefault("name", called)
    return made


def _message(number: int, message: Mapping[str, Any], knows_developer: bool) -> dict[str, Any]:
    where, role = f"messages[{number}]", message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role is {role!r}.", f"One of {', '.join(_ROLES)}.")
    made = {key: value for key, value in message.items() if value is not None and key not in ("content", "tool_calls")}
    made["role"] = "system" if role == "developer" and not knows_developer else role
    made["content"] = _text(f"{where}.content", message.get("content"))
    if calls := message.get("tool_calls"):
        made["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return made


def _text(where: str, content: Any) -> str:
    """A text, or the texts of parts, a line each."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} is neither text nor a list of parts.", "Send a string.")
    lines = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise Unsupported(f"{where} holds a part of type {kind}.", "This server takes text only.")
        lines.append(part[kind])
    return "\n".join(lines)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Templates want the arguments as an object, the API sends them as JSON text."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequest(f"{where} holds something that is no function call.", "Send {id, type, function}.")
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return made


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return given if given is not None else {}
    try:
        return json.loads(given or "{}")
    except ValueError:
        return given


_NOT_DONE = "Leave it out: this server does not do it."
_CONSTRAINED = "Leave it out: answers are not constrained here. Ask for the form in the prompt and check what comes."
_FREE = object()
"""Any value will do: it has no bearing on an answer of this server."""

FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), "Only 0: logprobs here are those of the model, without penalties."),
    "presence_penalty": ((0,), "Only 0: logprobs here are those of the model, without penalties."),
    "repetition_penalty": ((1,), "Only 1: logprobs here are those of the model, without penalties."),
    "logit_bias": (({},), "Leave it out: logprobs here are those of the model, without a bias."),
    "min_p": ((0,), "Only 0; use top_p or top_k."),
    "typical_p": ((1,), "Only 1; use top_p or top_k."),
    "min_tokens": ((0,), "Only 0."),
    "length_penalty": ((1,), _NOT_DONE),
    "use_beam_search": ((False,), _NOT_DONE),
    "best_of": ((1,), "Use n, and choose by yourself."),
    "suffix": (("",), _NOT_DONE),
    "response_format": (({"type": "text"},), _CONSTRAINED),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "allowed_token_ids": ((), _CONSTRAINED),
    "bad_words": (([],), _CONSTRAINED),
    "parallel_tool_calls": ((True,), "Only true: how many calls a model makes is not constrained here."),
    "functions": ((), "Use tools."),
    "function_call": (("auto", "none"), "Use tools and tool_choice."),
    "modalities": ((["text"],), "Text only."),
    "audio": ((), "Text only."),
    "prediction": ((), _NOT_DONE),
    "reasoning_effort": ((), "Use chat_template_kwargs, if the model's chat template knows of it."),
    "verbosity": ((), _NOT_DONE),
    "web_search_options": ((), _NOT_DONE),
    "store": ((False,), "Answers are not stored here."),
    "chat_template": ((), "The model's own chat template is used; render by yourself and use /v1/completions."),
    "documents": ((), "Put them into the messages."),
    "truncate_prompt_tokens": ((), "Cut the prompt by yourself."),
    "prompt_logprobs": ((), "Use /v1/completions with echo and logprobs."),
    "detokenize": ((True,), "Use /inference/v1/generate, which answers tokens."),
    "spaces_between_special_tokens": ((True,), _NOT_DONE),
    "features": ((), "Text only."),
    "content_parts": ((), "Text only."),
    "kv_transfer_params": ((), _NOT_DONE),
    "mm_processor_kwargs": ((), "Text only."),
    "priority": ((0,), "Only 0: requests are served in turn."),
    "stream_interval": ((1,), _NOT_DONE),
    "routed_experts_prompt_start": ((_FREE,), ""),
    "user": ((_FREE,), ""),
    "safety_identifier": ((_FREE,), ""),
    "metadata": ((_FREE,), ""),
    "prompt_cache_key": ((_FREE,), ""),
    "prompt_cache_retention": ((_FREE,), ""),
    "cache_salt": ((_FREE,), ""),
    "service_tier": (("auto", "default"), "There is one."),
    "request_id": ((_FREE,), ""),
}
"""Fields that do nothing here: the values that mean nothing, and what to do instead of others. A `cache_salt` keeps
prefix caches apart, and weights are never mixed in ours; experts are routed in models that are not served."""


def let_through(name: str, value: Any, where: str = "") -> None:
    """Raises Unsupported unless this value of one of FIELDS has no bearing on an answer."""
    allowed, cure = FIELDS[name]
    if value is not None and _FREE not in allowed and value not in allowed:
        raise Unsupported(f"{where}{name} is not served here.", cure)
