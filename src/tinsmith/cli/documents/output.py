"""JSON documents on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

from cyclopts import Parameter

from tinsmith.chat.strict_json import encode_json

AsJson = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON.")]


def print_json(value: Any) -> None:
    """Print a value as one document, with null for numbers that JSON has not."""
    sys.stdout.write(encode_json(_finite(value), compact=False) + "\n")


@contextmanager
def messages_on_stderr(active: bool) -> Iterator[None]:
    """Print to standard error for the duration of a block, so that a document is all of standard output."""
    if not active:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
