"""Trackers in threads: those that hang, fail or exit do not hold up a run, and what they can send is sent in order.

To break it: let `_monitor` return the tracker itself.
"""

from __future__ import annotations

import threading
import time

from tinsmith.rl.record.monitors.background import MAX_WAITING, BackgroundMonitor
from tinsmith.rl.record.monitors.base import Monitor


class Recorder(Monitor):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def metrics(self, step, values):
        self.steps.append(step)
        if step == 2:
            raise SystemExit("offline")

    def rollouts(self, step, kind, groups): ...

    def close(self):
        self.closed = True


def test_rows_arrive_in_order_although_one_fails(caplog):
    tracker = Recorder()
    monitor = BackgroundMonitor(tracker)
    for step in range(5):
        monitor.metrics(step, {})
    monitor.close()
    assert tracker.steps == [0, 1, 2, 3, 4]
    assert tracker.closed
    assert "The monitor Recorder failed: SystemExit: offline" in caplog.text


def test_tracker_that_hangs_holds_up_nothing(caplog):
    released = threading.Event()

    class Hanging(Recorder):
        def metrics(self, step, values):
            released.wait()

    monitor = BackgroundMonitor(Hanging(), close_seconds=0.05)
    begin = time.monotonic()
    for step in range(MAX_WAITING + 10):
        monitor.metrics(step, {})
    monitor.close()
    released.set()
    assert time.monotonic() - begin < 60
    assert "Hanging does not keep up" in caplog.text
    assert "Hanging hangs; the run ends without it" in caplog.text
