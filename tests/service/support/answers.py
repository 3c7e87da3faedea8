"""What every response has to be, whatever the request was."""

from __future__ import annotations

import json

import httpx

from tinsmith.service.wire.errors import is_openai_path

WITHOUT_DETAIL = (408, 410)
"""A poll without a result, and one of a sample that is lost, have bodies of their own."""


def fault_of(path: str, answer: httpx.Response) -> str:
    """What is wrong with the response to a request of `path`: a 5xx, or an error that is not in the API's form."""
    if answer.status_code >= 500:
        return f"{answer.status_code}: {answer.text[:300]}"
    if "event-stream" in answer.headers.get("content-type", ""):
        return "" if '"server_error"' not in answer.text else answer.text[-300:]
    if answer.status_code < 400 or answer.request.method == "HEAD":
        return ""
    try:
        body = json.loads(answer.content.decode())
    except ValueError:
        return f"{answer.status_code} without JSON: {answer.content[:300]!r}"
    if is_openai_path(path):
        error = body.get("error") if isinstance(body, dict) else None
        in_form = isinstance(error, dict) and isinstance(error.get("message"), str) and "param" in error
    else:
        in_form = isinstance(body, dict) and isinstance(body.get("detail"), str)
    return "" if in_form or answer.status_code in WITHOUT_DETAIL else f"{answer.status_code}: {answer.text[:300]}"
