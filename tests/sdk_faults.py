"""Rare faults of the SDK, kept away from tests: on Python 3.11 `close()` may never return, and its transport may crash.

Users see both, rarely (docs/reference/compatibility.md). Leaves out the transport of programs that tests start: a
program that crashes is one failed test, a process of pytest-xdist is the end of the run.
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


def keep_cancellations() -> None:
    """Replace `asyncio.wait_for` by Python 3.12's on Python 3.11, whose own loses cancellations.

    `ServiceClient.close()` cancels tasks that wait in this way, and waits for them. tests/faults/test_closes.py tests
    that, with `ORIGINAL`.
    """
    if sys.version_info < (3, 12):
        asyncio.wait_for = wait_for


def use_httpx() -> None:
    """Have the SDK's clients in this process use httpx for transport, as they also do when a server says so.

    Threads of its default, pyqwest 0.12, have crashed in 2 of about 30 runs of the whole suite.
    """
    import httpx
    from tinker import _base_client, _constants

    limits = _constants.DEFAULT_CONNECTION_LIMITS
    _base_client._default_pyqwest_transport = lambda: httpx.AsyncHTTPTransport(http2=True, limits=limits)
