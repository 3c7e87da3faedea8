"""The recorder makes one row of a step from what was added to it, the gauges, rates and times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinsmith.rl.policy.request_limit import RequestLimit, TokenRates
from tinsmith.rl.record.layout import Kind
from tinsmith.rl.record.monitors.base import Monitor, Monitors
from tinsmith.rl.record.recorder import Recorder
from tinsmith.rl.record.timeline import OverlapMeter, Timeline
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.types import Group, Message, Rollout, Task


class Received(Monitor):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.groups: list[tuple[int, Kind, Sequence[Group]]] = []
        self.closed = 0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, values))

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        self.groups.append((step, kind, groups))

    def close(self) -> None:
        self.closed += 1


def group(reward: float) -> Group:
    task = Task(id="1", messages=(Message(role="user", content="?"),), answer="4")
    return Group(task=task, rollouts=(Rollout.single((), reward),), version=1)


async def recorded(folder: Path, monitor: Monitor) -> Recorder:
    """A recorder of a run of 2 steps, in its step 1."""
    timeline, rates = Timeline(folder), TokenRates(RequestLimit(1))
    recorder = Recorder(2, Monitors([monitor]), timeline, rates, OverlapMeter(lambda: None))
    recorder.begin(1)
    return recorder


def test_row_has_what_every_part_measured(tmp_path: Path) -> None:
    async def step() -> Mapping[str, float]:
        recorder = await recorded(tmp_path, received)
        recorder.read_at_each_step(lambda batch: {"groups": float(len(batch.groups))})
        recorder.take(Batch(step=1, groups=(group(0.5),), numbers={"sync/weights": 2.0}), version=3)
        recorder.add({"optim/lr": 0.1, "tokens/trained": 8.0})
        recorder.add({"optim/loss": -1.0})
        groups, row = recorder.finish_step(1)
        assert (groups, recorder.step) == ((group(0.5),), 0)
        recorder.close()
        return row

    received = Received()
    row = asyncio.run(step())
    expected = {"reward/mean": 0.5, "policy/staleness": 2, "sync/weights": 2.0, "optim/lr": 0.1, "optim/loss": -1.0}
    assert expected.items() <= row.items()
    times = {"time/step", "time/sampling", "time/rollouts", "time/update", "speed/trained_tokens_per_second"}
    assert times | {"groups"} <= row.keys()
    assert received.rows == [(1, row)]
    assert received.groups == [(1, "train", (group(0.5),))]
    assert received.closed == 1


def test_metrics_without_a_batch_are_a_row_too(tmp_path: Path) -> None:
    async def steps() -> None:
        recorder = await recorded(tmp_path, received)
        assert recorder.finish_step(1)[1].keys() >= {"time/step"}
        recorder.add({"optim/lr": 0.1})  # before anything else of step 2
        recorder.finish_step(2)
        assert recorder.finish_step(3) == ((), {})
        recorder.close()

    received = Received()
    asyncio.run(steps())
    assert [step for step, _ in received.rows] == [1, 2]
    assert received.rows[1][1]["optim/lr"] == 0.1
    assert received.groups == []
