"""Errors as clients of the OpenAI dialect read them: {"error": {message, type, code, param}}."""

from __future__ import annotations

from typing import Any

from tinsmith.errors import BadRequest, TinsmithError

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
