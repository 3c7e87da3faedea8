"""Log lines as text for people or as JSON for programs, with the request, session and owner that they concern.

A task that handles a request sets its log context; every line that the task writes contains it, and the tasks that it
creates inherit it. Lines contain no keys, prompts or results.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from rich.logging import RichHandler
from typing_extensions import override

from tinsmith.terminal import new_console

_SECRET = re.compile(r"tml-[\w-]+|eyJ[\w-]+\.[\w.-]+|(?<=signature=)\w+|(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
"""Keys, tokens, signatures of links, and credentials in URLs, which are masked: a message may quote a client or a
library."""
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
"""Escapes of control characters, so that text of a client cannot forge log lines."""


@dataclass(frozen=True, slots=True)
class LogContext:
    """Owner, session and request of a task's log lines; empty if unknown."""

    owner: str = ""
    session_id: str = ""
    request_id: str = ""


_EMPTY = LogContext()
_CONTEXT: ContextVar[LogContext] = ContextVar("log_context", default=_EMPTY)
_ARRIVED: ContextVar[int] = ContextVar("arrived", default=0)


@contextmanager
def log_context(request_id: str = "", owner: str = "") -> Iterator[None]:
    """Set the log context to a request for the duration of the block. The session is the first part of its id."""
    token = _CONTEXT.set(LogContext(owner, request_id.partition(":")[0], request_id))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


class HttpLogContext:
    """Context of an HTTP request that arrives now: its arrival time, and an empty log context.

    A class, because every request has one: `contextmanager` takes five times as long.
    """

    __slots__ = ("_arrived", "_context")

    def __enter__(self) -> None:
        self._arrived = _ARRIVED.set(time.time_ns())
        self._context = _CONTEXT.set(_EMPTY)

    def __exit__(self, *_: object) -> None:
        _CONTEXT.reset(self._context)
        _ARRIVED.reset(self._arrived)


def arrival_ns() -> int:
    """Arrival time of the current HTTP request in nanoseconds since 1970; 0 outside of a request."""
    return _ARRIVED.get()


def add_log_context(owner: str = "", session_id: str = "", request_id: str = "") -> None:
    """Set owner, session_id or request_id, unless empty, in the context of the current task."""
    now = _CONTEXT.get()
    _CONTEXT.set(LogContext(owner or now.owner, session_id or now.session_id, request_id or now.request_id))


class TextLines(logging.Formatter):
    """`time LEVEL message [request=… session=… owner=…]`. `bare` leaves out time and level, which rich prints."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__("%(message)s" if bare else "%(asctime)s %(levelname)s %(message)s")

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        context = {name.removesuffix("_id"): value for name, value in asdict(_CONTEXT.get()).items() if value}
        suffix = " ".join(f"{name}={value}" for name, value in reversed(context.items()))
        line = super().formatMessage(record)
        return _SECRET.sub("***", f"{line} [{suffix}]" if suffix else line).translate(_VISIBLE)

    @override
    def formatException(self, ei: Any) -> str:
        return _SECRET.sub("***", super().formatException(ei))


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the log context and the traceback of an exception."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in asdict(_CONTEXT.get()).items() if value},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _SECRET.sub("***", json.dumps(line))


def configure_logging(form: Literal["text", "json"], level: str) -> None:
    """Configure the log of the process, on standard error."""
    target: logging.Handler
    if form == "json":
        target = logging.StreamHandler()
        target.setFormatter(JsonLines())
    elif sys.stderr.isatty():
        target = RichHandler(console=new_console(stderr=True), show_path=False)
        target.setFormatter(TextLines(bare=True))
    else:  # a file or a pipe: no colours, no wrapping
        target = logging.StreamHandler()
        target.setFormatter(TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[target])
    logging.getLogger("tinsmith").setLevel(level.upper())
    for name in ("uvicorn.error", "alembic", "httpx"):  # httpx logs every request, and vLLM is watched by requests
        logging.getLogger(name).setLevel(logging.WARNING)
