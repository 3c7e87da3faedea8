"""Responses to errors, in the form of the API that was called."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tinsmith.chat.errors import error_headers, openai_error, openai_error_of
from tinsmith.errors import Busy, TinsmithError
from tinsmith.service.wire.json_response import SafeJSONResponse

PREFIXES = ("/v1/", "/oai/api/v1/", "/inference/v1/")


def is_openai_path(path: str) -> bool:
    """Whether clients of `path` expect errors in the OpenAI API's form."""
    return path.startswith(PREFIXES)


def error_json(path: str, message: str, status: int, *, category: str | None = None, code: str | None = None) -> Any:
    """JSON body of an error without further details."""
    if is_openai_path(path):
        return openai_error(message, status, code)
    return {"detail": message} | ({"category": category} if category else {})


def error_response(path: str, error: TinsmithError) -> Response:
    """The response to a request of `path`."""
    headers = error_headers(error)
    if isinstance(error, Busy):
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if error.status == 401:
        headers["WWW-Authenticate"] = 'ApiKey error="invalid_token"'  # the SDK exchanges its token for a new one
    if is_openai_path(path):
        return SafeJSONResponse(openai_error_of(error), error.status, headers)
    return SafeJSONResponse(error_json(path, str(error), error.status, category=error.category), error.status, headers)
