"""Threads for work on large bodies, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LARGE_BYTES = 64 * 2**10
"""Bytes from which parsing a body takes longer than the way to a thread and back."""

P = ParamSpec("P")
R = TypeVar("R")


async def run_in_thread_if_large(size: int, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Return the function's result. It runs in a thread if `size` bytes are more than LARGE_BYTES."""
    if size > LARGE_BYTES:
        return await asyncio.to_thread(function, *args, **options)
    return function(*args, **options)
