"""Responses to errors, in the form of the API that was called."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from starlette.responses import Response

from tinsmith.chat.request import error_body, error_code, error_param
from tinsmith.errors import Busy, InternalError, TinsmithError
from tinsmith.service.wire.json_response import SafeJSONResponse

log = logging.getLogger(__name__)

ENDINGS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end a task, and are not faults. Faults are all others: a panic of a Rust library is no Exception."""

PREFIXES = ("/v1/", "/oai/api/v1/", "/inference/v1/")
_PARAMS = {"num_samples": "n", "topk_sample_logprobs": "logprobs", "topk_prompt_logprobs": "logprobs"}
"""Names of the engine's fields in the OpenAI API."""
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def is_openai_path(path: str) -> bool:
    """Whether clients of `path` expect errors in the OpenAI API's form."""
    return path.startswith(PREFIXES)


def openai_error(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """JSON body of an error with the code that belongs to `status`, unless `code` is given."""
    return error_body(message, status, code or _CODES.get(status), param)


def openai_error_of(error: TinsmithError) -> dict[str, Any]:
    """JSON body of one of Tinsmith's errors."""
    field = error_param(error)
    return openai_error(str(error), error.status, error_code(error), _PARAMS.get(field, field) if field else None)


def as_tinsmith_error(error: BaseException, place: str) -> TinsmithError:
    """The error itself, or an InternalError for an exception that nothing handled, whose traceback is logged."""
    if isinstance(error, TinsmithError):
        return error
    request_id = f"req-{uuid.uuid4().hex}"
    log.error("%s failed. Request id: %s", place, request_id, exc_info=error)
    message = f"The server failed on this request. Its id is {request_id}."
    return InternalError(message, "The server's log has the traceback with this id.", request_id=request_id)


def error_json(path: str, message: str, status: int, *, category: str | None = None, code: str | None = None) -> Any:
    """JSON body of an error without further details."""
    if is_openai_path(path):
        return openai_error(message, status, code)
    return {"detail": message} | ({"category": category} if category else {})


def error_response(path: str, error: TinsmithError) -> Response:
    """The response to a request of `path`."""
    headers = {}
    if isinstance(error, Busy):
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if error.status == 401:
        headers["WWW-Authenticate"] = 'ApiKey error="invalid_token"'  # the SDK exchanges its token for a new one
    if isinstance(error, InternalError):
        headers["x-request-id"] = error.request_id
    if is_openai_path(path):
        return SafeJSONResponse(openai_error_of(error), error.status, headers)
    return SafeJSONResponse(error_json(path, str(error), error.status, category=error.category), error.status, headers)
