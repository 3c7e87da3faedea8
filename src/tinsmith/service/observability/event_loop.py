"""Pauses of the event loop, which delay every request: measured, and garbage collections made short."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from tinsmith.processes.garbage_collection import leave_out_existing

INTERVAL_S = 0.1
"""Time between two measurements."""
COLLECT_AFTER = 10_000
"""New objects after which the youngest are collected: those of some ten requests in progress."""


async def measure_delays(observe: Callable[[float], None]) -> None:
    """Forever: observe by how many seconds a timer fires late. A request that comes then waits as long."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(0.0, loop.time() - due))


def limit_collections() -> None:
    """Make garbage collections short and rare, since every request waits for them.

    Objects that exist now are left out of later ones: most are the modules', which a full collection would visit each
    time. With Python's own threshold, a small request would cause several collections.
    """
    leave_out_existing()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
