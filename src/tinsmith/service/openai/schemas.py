"""Request bodies of the OpenAI API and of vLLM's /inference/v1/generate, and the API's error bodies.

A field that could change the result is implemented or rejected by name; fields without effect on the result (user id,
routing hints) are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator

from tinsmith.chat.request import ChatRequest, error_body, error_code, parse_json_object, select_fields
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, TinsmithError
from tinsmith.service.wire.schemas import WireModel, parse


class StreamOptions(WireModel):
    """stream_options."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class SamplingOptions(WireModel):
    """How tokens are sampled, and what ends a sequence."""

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
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


class OutputOptions(SamplingOptions):
    """The model to sample from, and the form of the response."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> OutputOptions:
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options are read only with stream: true")
        return self


class ChatBody(ChatRequest, OutputOptions):
    """chat/completions."""

    top_logprobs: int = Field(0, ge=0)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionBody(OutputOptions):
    """completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    add_special_tokens: bool = True


class GenerateParams(SamplingOptions):
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
    """The body as `kind`; null counts as absent.

    Raises BadRequest for invalid or unknown fields, Unsupported for fields that are not implemented. `where` prefixes
    field names in errors.
    """

    def unknown(key: str) -> BadRequest:
        return BadRequest(f"{where}{key} is not a field of this request.", did_you_mean(key, kind.model_fields))

    values = parse_json_object(body) if isinstance(body, bytes) else body
    return parse(kind, json.dumps(select_fields(values, kind, unknown, where)).encode())


PREFIXES = ("/v1/", "/oai/api/v1/", "/inference/v1/")
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def is_openai_path(path: str) -> bool:
    """Whether clients of `path` expect errors in the OpenAI API's form."""
    return path.startswith(PREFIXES)


def openai_error(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """JSON body of an error with the code that belongs to `status`, unless `code` is given."""
    return error_body(message, status, code or _CODES.get(status))


def openai_error_of(error: TinsmithError) -> dict[str, Any]:
    """JSON body of one of Tinsmith's errors."""
    return openai_error(str(error), error.status, error_code(error))
