"""Work on large bodies goes aside, into a thread, so that the event loop goes on answering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LARGE_BYTES = 64 * 2**10
"""Bytes from which reading a body takes longer than going into a thread and back."""

P = ParamSpec("P")
R = TypeVar("R")


async def run_in_thread_if_large(size: int, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """The function's result; from a thread, if `size` bytes are a lot."""
    return await asyncio.to_thread(function, *args, **options) if size > LARGE_BYTES else function(*args, **options)
