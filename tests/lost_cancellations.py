"""`asyncio.wait_for` as of Python 3.12, for tests on Python 3.11, whose own loses cancellations.

The SDK's `ServiceClient.close()` cancels tasks that wait in this way and waits for them, so that on 3.11 it rarely
never returns (docs/not-learning.md). tests/faults/test_closes.py tests that, with `ORIGINAL`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

R = TypeVar("R")
ORIGINAL = asyncio.wait_for


async def wait_for(awaitable: Awaitable[R], timeout: float | None) -> R:
    """Wait for a result. Raises TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        return await awaitable


def mend() -> None:
    """Replace `asyncio.wait_for` in this process, on Python 3.11."""
    if sys.version_info < (3, 12):
        asyncio.wait_for = wait_for
