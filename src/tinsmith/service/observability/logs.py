"""Log lines: text for people, JSON for programs. Each tells the request, the session and the owner that it concerns.

A task that answers a request, or carries one out, notes what it is about; every line written below it has that, and
tasks begun by it inherit it. Keys, prompts and results are in no line.
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
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console
from rich.logging import RichHandler

_SECRET = re.compile(r"tml-[\w-]+|eyJ[\w-]+\.[\w.-]+|(?<=signature=)\w+|(?<=://)[^\s/@]*:[^\s/@]+(?=@)")
"""Keys, tokens, the signatures of links and what stands before the host in a URL: a message may quote what a client or
a library said. None of ours holds one."""
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
"""A client's text must not begin lines of its own."""


@dataclass(frozen=True, slots=True)
class LogContext:
    """The owner, session and request that log lines of a task concern; empty if unknown."""

    owner: str = ""
    session_id: str = ""
    request_id: str = ""


_CONTEXT: ContextVar[LogContext] = ContextVar("about", default=LogContext())  # noqa: B039 - frozen
_ARRIVED: ContextVar[int] = ContextVar("arrived", default=0)


def current_log_context() -> LogContext:
    """The context of the current task."""
    return _CONTEXT.get()


@contextmanager
def log_context(request_id: str = "", owner: str = "") -> Iterator[None]:
    """Lines inside concern this request; its id begins with its session's."""
    token = _CONTEXT.set(LogContext(owner, request_id.partition(":")[0], request_id))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


@contextmanager
def http_log_context() -> Iterator[None]:
    """Handle an HTTP request, which arrives now, inside the block, with an empty context."""
    token = _ARRIVED.set(time.time_ns())
    try:
        with log_context():
            yield
    finally:
        _ARRIVED.reset(token)


def arrival_ns() -> int:
    """Arrival of the current HTTP request, in nanoseconds since 1970; 0 outside of one."""
    return _ARRIVED.get()


def add_log_context(**context: str) -> None:
    """Add owner, session_id or request_id to the context of the current task."""
    _CONTEXT.set(replace(_CONTEXT.get(), **context))


class TextLines(logging.Formatter):
    """`time LEVEL message [request=… session=… owner=…]`; on a terminal rich writes time and level."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__("%(message)s" if bare else "%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever a client put into it."""
        context = {name.removesuffix("_id"): value for name, value in asdict(_CONTEXT.get()).items() if value}
        about = " ".join(f"{name}={value}" for name, value in reversed(context.items()))
        line = super().formatMessage(record)
        return _SECRET.sub("***", f"{line} [{about}]" if about else line).translate(_VISIBLE)

    def formatException(self, ei: Any) -> str:
        """The traceback."""
        return _SECRET.sub("***", super().formatException(ei))


class JsonLines(logging.Formatter):
    """An object a line: time, level, logger, message, what it concerns, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
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
    """The process's log from here on, on standard error."""
    target: logging.Handler
    if form == "json":
        target = logging.StreamHandler()
        target.setFormatter(JsonLines())
    elif sys.stderr.isatty():
        target = RichHandler(console=Console(stderr=True), show_path=False)
        target.setFormatter(TextLines(bare=True))
    else:  # a file: no colours, no wrapping
        target = logging.StreamHandler()
        target.setFormatter(TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[target])
    logging.getLogger("tinsmith").setLevel(level.upper())
    for name in ("uvicorn.error", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
