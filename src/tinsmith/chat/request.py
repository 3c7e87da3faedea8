"""The chat completion request of the OpenAI API, and which of its fields are accepted without being implemented."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from tinsmith.chat.messages import parse_messages, parse_tools
from tinsmith.chat.strict_json import parse_json
from tinsmith.errors import BadRequest, TinsmithError, Unsupported


class PromptTooLong(BadRequest):
    """The prompt, with the tokens to sample, exceeds the model's context or the configured limit."""


class StreamOptions(BaseModel):
    """stream_options."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class StreamedRequest(BaseModel):
    """A request whose response may be a stream."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, options: StreamOptions, request: ValidationInfo) -> StreamOptions:
        if options.include_usage and not request.data.get("stream"):
            raise ValueError("stream_options are read only with stream: true")
        return options


class ChatRequest(StreamedRequest):
    """Body of chat/completions: the fields that the service and the agent endpoint share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=65_536)
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=1024)
    tool_choice: Any = "auto"
    n: int = Field(1, ge=1)
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False

    @property
    def most_tokens(self) -> int | None:
        """Largest number of tokens of a reply, by either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_tools(self) -> list[dict[str, Any]]:
        """Tools to render into the prompt. Raises BadRequest or Unsupported."""
        return parse_tools(self.tools, self.tool_choice)

    def template_messages(self, template: str, images: list[str] | None = None) -> list[dict[str, Any]]:
        """Messages in the form that `template` reads; URLs of images are added to `images`, None refuses them.

        Raises BadRequest or Unsupported.
        """
        return parse_messages(self.messages, developer_role="developer" in template, images=images)


MAX_DESCRIBED = 10
"""Errors of a body that an answer describes."""
KEY_CHARACTERS = 100
"""Characters of an unknown field's name that an error repeats."""


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a request body. Raises BadRequest unless it is a JSON object."""
    try:
        values = parse_json(body)
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}.", "Send a JSON object.") from error
    if not isinstance(values, dict):
        raise BadRequest("The body is not a JSON object.", "Send a JSON object.")
    return values


def select_fields(
    values: Mapping[str, Any],
    model: type[BaseModel],
    unknown: Callable[[str], TinsmithError],
    where: str = "",
) -> dict[str, Any]:
    """Values of the fields that `model` declares; null counts as absent.

    Raises Unsupported for a value of NO_OP_FIELDS that would change the result, and `unknown(key)` for any other field.
    `where` prefixes field names in errors.
    """
    selected = {}
    for key, value in values.items():
        if key in model.model_fields:
            if value is not None:
                selected[key] = value
        elif key in NO_OP_FIELDS:
            check_no_op(key, value, where)
        elif value is not None:
            raise unknown(key[:KEY_CHARACTERS])
    return selected


def describe_errors(errors: Iterable[Any]) -> str:
    """Pydantic's validation errors as one sentence."""
    parts = []
    for error in islice(errors, MAX_DESCRIBED):
        field = ".".join(str(part) for part in error["loc"] if part != "body")
        parts.append(f"'{field}': {error['msg']}" if field else str(error["msg"]))
    return "; ".join(parts) + "."


def first_field(errors: Iterable[Any]) -> str | None:
    """The field of the first of pydantic's validation errors, such as `messages[0]`; None if it names none."""
    for error in errors:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
        return "".join(parts).removeprefix(".") or None
    return None


_NOT_IMPLEMENTED = "Remove the field: this server does not implement it."
_CONSTRAINED = (
    "Remove the field: decoding is not constrained here. Request the format in the prompt and check the reply."
)
_ANY_VALUE = object()
"""Marks a field whose value never affects a result of this server."""

NO_OP_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), "Only 0: logprobs are the model's own, without penalties."),
    "presence_penalty": ((0,), "Only 0: logprobs are the model's own, without penalties."),
    "repetition_penalty": ((1,), "Only 1: logprobs are the model's own, without penalties."),
    "logit_bias": (({},), "Remove the field: logprobs are the model's own, without a bias."),
    "min_p": ((0,), "Only 0; use top_p or top_k."),
    "typical_p": ((1,), "Only 1; use top_p or top_k."),
    "min_tokens": ((0,), "Only 0."),
    "length_penalty": ((1,), _NOT_IMPLEMENTED),
    "use_beam_search": ((False,), _NOT_IMPLEMENTED),
    "best_of": ((1,), "Use n and select from the choices."),
    "suffix": (("",), _NOT_IMPLEMENTED),
    "response_format": (({"type": "text"},), _CONSTRAINED),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "allowed_token_ids": ((), _CONSTRAINED),
    "bad_words": (([],), _CONSTRAINED),
    "parallel_tool_calls": ((True,), "Only true: the number of tool calls is not constrained."),
    "functions": ((), "Use tools."),
    "function_call": (("auto", "none"), "Use tools and tool_choice."),
    "modalities": ((["text"],), "Text only."),
    "audio": ((), "Text only."),
    "prediction": ((), _NOT_IMPLEMENTED),
    "reasoning_effort": ((), "Use chat_template_kwargs, if the model's chat template reads the value."),
    "verbosity": ((), _NOT_IMPLEMENTED),
    "web_search_options": ((), _NOT_IMPLEMENTED),
    "store": ((False,), "Responses are not stored."),
    "previous_response_id": ((), "Send the whole conversation: responses are not stored."),
    "conversation": ((), "Send the whole conversation: responses are not stored."),
    "background": ((False,), "Responses are not stored."),
    "include": (([], ["reasoning.encrypted_content"]), "Responses hold nothing else."),
    "truncation": (("disabled",), "Truncate the conversation before sending it."),
    "text": (({}, {"format": {"type": "text"}}), _CONSTRAINED),
    "reasoning": (({},), "Use chat_template_kwargs of /v1/chat/completions, if the model's template reads the value."),
    "max_tool_calls": ((), _NOT_IMPLEMENTED),
    "chat_template": (
        (),
        "The model's own chat template is used; render the prompt yourself and call /v1/completions.",
    ),
    "documents": ((), "Put the documents into the messages."),
    "truncate_prompt_tokens": ((), "Truncate the prompt before sending it."),
    "prompt_logprobs": ((), "Use /v1/completions with echo and logprobs."),
    "detokenize": ((True,), "Use /inference/v1/generate, which returns tokens."),
    "spaces_between_special_tokens": ((True,), _NOT_IMPLEMENTED),
    "features": ((), "Text only."),
    "content_parts": ((), "Text only."),
    "kv_transfer_params": ((), _NOT_IMPLEMENTED),
    "mm_processor_kwargs": ((), "Text only."),
    "priority": ((0,), "Only 0: requests have no priority."),
    "stream_interval": ((1,), _NOT_IMPLEMENTED),
    "return_routed_experts": ((False,), "Use /inference/v1/generate, which returns them."),
    "routed_experts_prompt_start": ((_ANY_VALUE,), ""),
    "user": ((_ANY_VALUE,), ""),
    "safety_identifier": ((_ANY_VALUE,), ""),
    "metadata": ((_ANY_VALUE,), ""),
    "prompt_cache_key": ((_ANY_VALUE,), ""),
    "prompt_cache_retention": ((_ANY_VALUE,), ""),
    "cache_salt": ((_ANY_VALUE,), ""),
    "service_tier": (("auto", "default"), "There is one service tier."),
    "request_id": ((_ANY_VALUE,), ""),
}
"""Field -> (values accepted because they have no effect here, hint for all other values). `cache_salt` separates prefix
caches, which never mix tenants or weights here; `routed_experts_prompt_start` is read only where experts are returned.
"""


def check_no_op(name: str, value: Any, where: str = "") -> None:
    """Raise Unsupported unless this value of one of NO_OP_FIELDS has no effect on the result."""
    accepted, hint = NO_OP_FIELDS[name]
    if value is not None and _ANY_VALUE not in accepted and value not in accepted:
        raise Unsupported(f"{where}{name} is not supported by this server.", hint, field=where + name)
