"""Pauses of the event loop: measured in a histogram, and garbage collections without the modules."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from tests.service.support.inprocess import until
from tinsmith.service.observability import event_loop
from tinsmith.service.observability.event_loop import measure_delays

COLLECTIONS = """
import gc
from tinsmith.service.observability.event_loop import COLLECT_AFTER, limit_collections
before = len(gc.get_objects())
limit_collections()
print(gc.get_freeze_count() > before / 2, len(gc.get_objects()) < before / 10, gc.get_threshold()[0] == COLLECT_AFTER)
"""


def test_delay_is_the_time_by_which_a_timer_is_late() -> None:
    """Break `measure_delays`: observe INTERVAL_S."""

    async def main() -> None:
        delays: list[float] = []
        task = asyncio.create_task(measure_delays(delays.append))
        for _ in range(20):  # the timer may have fired before the pause, if the machine stood still
            count = len(delays)
            await asyncio.sleep(event_loop.INTERVAL_S / 2)
            time.sleep(0.5)  # noqa: ASYNC251 - a pause of the event loop
            await until(lambda count=count: len(delays) > count)
            if max(delays) > 0.3:
                break
        task.cancel()
        assert 0.3 < max(delays) < 120

    asyncio.run(main())


def test_collections_leave_out_the_modules() -> None:
    """In a process of its own, since it is for good. Break `limit_collections`: leave out `freeze`."""
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
