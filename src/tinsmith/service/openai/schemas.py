"""Request bodies of the OpenAI API and of vLLM's /inference/v1/generate.

A field that could change the result is implemented or rejected by name; fields without effect on the result (user id,
routing hints) are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from tinsmith.chat.request import ChatRequest, StreamedRequest, parse_json_object, select_fields
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, TooLarge, UserError
from tinsmith.service.wire.schemas import Numbers, WireModel, parse

Name = Annotated[str, Field(max_length=1024)]
"""A name of weights, such as BASE;tinker://RUN/KIND/NAME."""


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


class OutputOptions(SamplingOptions, StreamedRequest):
    """The model to sample from, and the form of the response."""

    model: Name
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class ChatBody(ChatRequest, OutputOptions):
    """chat/completions."""

    top_logprobs: int = Field(0, ge=0)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionBody(OutputOptions):
    """completions."""

    prompt: (
        str | Annotated[list[str], Field(fail_fast=True)] | Numbers | Annotated[list[Numbers], Field(fail_fast=True)]
    )
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    add_special_tokens: bool = True


class GenerateParams(SamplingOptions):
    """sampling_params of /inference/v1/generate."""

    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0)
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = Field(0, ge=0)


class GenerateBody(WireModel):
    """/inference/v1/generate."""

    model: Name
    token_ids: Numbers
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: Literal[False] = False


B = TypeVar("B", bound=WireModel)


def parse_exact(kind: type[B], body: bytes | Mapping[str, Any], where: str = "") -> B:
    """The body as `kind`; null counts as absent.

    Raises BadRequest for invalid or unknown fields, Unsupported for fields that are not implemented. `where` prefixes
    field names in errors.
    """

    def unknown(key: str) -> BadRequest:
        message, hint = f"{where}{key} is not a field of this request.", did_you_mean(key, kind.model_fields)
        return BadRequest(message, hint, field=where + key)

    values = parse_json_object(body) if isinstance(body, bytes) else body
    _check_values(values)
    return parse(kind, json.dumps(select_fields(values, kind, unknown, where)).encode())


MAX_VALUES = 2**18
"""Objects, lists, keys and texts in a body: numbers are not counted. Millions would stop the server for seconds."""


def _check_values(values: Any) -> None:
    """Raise TooLarge for a body of over MAX_VALUES."""
    count, waiting = 0, [values]
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, Mapping):
            count += len(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(part for part in value if not isinstance(part, int))
        if count + len(waiting) > MAX_VALUES:
            raise TooLarge(f"The body holds over {MAX_VALUES} objects, lists and texts.", "Send fewer in one request.")


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Errors that are raised in the block, and name no field, concern this one."""
    try:
        yield
    except UserError as error:
        error.field = error.field or field
        raise
