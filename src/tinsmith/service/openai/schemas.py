"""What clients of the OpenAI dialect send: chat, completions, and tokens in / tokens out as vLLM has it.

Every field that could change an answer is either done or refused by name; fields that could not (who asks, where to
route) are let through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator

from tinsmith.chat.messages import FIELDS, let_through
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, TinsmithError
from tinsmith.service.wire.schemas import WireModel, parse


class StreamOptions(WireModel):
    """stream_options."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Drawing(WireModel):
    """How tokens are drawn, and where they end."""

    n: int = Field(1, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


class Telling(Drawing):
    """How an answer is told."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _of_a_stream(self) -> Telling:
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options are read only with stream: true")
        return self


class ChatBody(Telling):
    """chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionBody(Telling):
    """completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    add_special_tokens: bool = True


class GenerateParams(Drawing):
    """sampling_params of /inference/v1/generate."""

    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0)


class GenerateBody(WireModel):
    """/inference/v1/generate."""

    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: Literal[False] = False


B = TypeVar("B", bound=WireModel)


def parse_exact(kind: type[B], body: bytes | Mapping[str, Any], where: str = "") -> B:
    """The body as `kind`, null being as good as absent. Raises BadRequest, or Unsupported for what is not done."""
    values = json_object(body) if isinstance(body, bytes) else body
    kept = {}
    for key, value in values.items():
        if key in kind.model_fields:
            if value is not None:
                kept[key] = value
        elif key in FIELDS:
            let_through(key, value, where)
        elif value is not None:
            raise BadRequest(f"{where}{key} is not known here.", did_you_mean(key, kind.model_fields))
    return parse(kind, json.dumps(kept).encode())


def json_object(body: bytes) -> dict[str, Any]:
    """Raises BadRequest unless the body is one."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}", "Send a JSON object.") from error
    if not isinstance(values, dict):
        raise BadRequest("The body is no JSON object.", "Send one.")
    return values


PREFIXES = ("/v1/", "/oai/api/v1/", "/inference/v1/")
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class TooLong(BadRequest):
    """The prompt, or what is asked beyond it, is longer than the model's context."""


def is_theirs(path: str) -> bool:
    """Whether who asks for this path reads these errors."""
    return path.startswith(PREFIXES)


def shaped(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code or _CODES.get(status), "param": None}}


def shape_of(error: TinsmithError) -> dict[str, Any]:
    """The body of one of our errors."""
    return shaped(str(error), error.status, "context_length_exceeded" if isinstance(error, TooLong) else None)
