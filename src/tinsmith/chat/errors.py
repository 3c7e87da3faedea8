"""Errors of requests: in the form of the OpenAI API, and those that nothing else handled."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from tinsmith.chat.request import PromptTooLong
from tinsmith.errors import InternalError, TinsmithError, UserError

log = logging.getLogger(__name__)

ENDINGS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end a task, and are not faults. Faults are all others: a panic of a Rust library is no Exception."""

_PARAMS = {"num_samples": "n", "topk_sample_logprobs": "logprobs", "topk_prompt_logprobs": "logprobs"}
"""Names of the engine's fields in the OpenAI API."""
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def as_tinsmith_error(error: BaseException, place: str, log_name: str = "The server's log") -> TinsmithError:
    """The error itself, or an InternalError for an exception that nothing handled, whose traceback is logged.

    `log_name` tells the reader of the error where.
    """
    if isinstance(error, TinsmithError):
        return error
    request_id = f"req-{uuid.uuid4().hex}"
    log.error("%s failed. Request id: %s", place, request_id, exc_info=error)
    message = f"The server failed on this request. Its id is {request_id}."
    return InternalError(message, f"{log_name} has the traceback with this id.", request_id=request_id)


def error_headers(error: TinsmithError) -> dict[str, str]:
    """Headers of the response to an error, in every API."""
    return {"x-request-id": error.request_id} if isinstance(error, InternalError) else {}


def openai_error(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """JSON body of an error with the code that belongs to `status`, unless `code` is given."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code or _CODES.get(status), "param": param}}


def openai_error_of(error: TinsmithError) -> dict[str, Any]:
    """JSON body of one of Tinsmith's errors; `param` is the field of the request that it concerns."""
    field = error.field if isinstance(error, UserError) else None
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return openai_error(str(error), error.status, code, _PARAMS.get(field, field) if field else None)
