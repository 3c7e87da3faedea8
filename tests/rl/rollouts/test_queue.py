"""Batches are sampled ahead by the rule of their style, delivered in order, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tinsmith.errors import TinsmithError
from tinsmith.rl.data.sources import Addition
from tinsmith.rl.data.tasks import TaskSampler, TasksConfig, split
from tinsmith.rl.policy.request_limit import RequestLimit
from tinsmith.rl.policy.sampling import SamplingConfig, request_seed
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.rollouts.buffer import MemoryConfig
from tinsmith.rl.rollouts.queue import BatchQueue, SavedQueue
from tinsmith.rl.rollouts.replay import BatchSelector
from tinsmith.rl.rollouts.runner import RolloutConfig, RolloutRunner
from tinsmith.rl.rollouts.sampler import Sampler, SamplingPlan
from tinsmith.rl.rollouts.store import MemoryStore
from tinsmith.rl.rollouts.weights import SyncConfig, WeightPublisher
from tinsmith.rl.types import Rollout, Task
from tinsmith.testing import ScriptedSnapshot, run_virtually


class VersionedPolicy:
    """A policy without weights: a version, and the names of saved checkpoints."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.saved: list[str] = []

    @property
    def models(self):
        return self

    async def snapshot(self):
        return ScriptedSnapshot(("",), np.zeros(1), self.version)

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        self.saved.append(name)
        return name

    async def open_checkpoint(self, path: str, version: int):
        assert path in self.saved
        return ScriptedSnapshot(("",), np.zeros(1), version)

    async def delete_checkpoint(self, path: str) -> None:
        self.saved.remove(path)


class CountingWorkflow:
    """A workflow that counts concurrent calls and waits until `open` is set."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.seeds: list[int] = []
        self.open = asyncio.Event()
        self.open.set()

    async def run(self, task: Task, policy, *, count: int, seed: int) -> tuple[Rollout, ...]:
        self.seeds.append(seed)
        self.now += 1
        self.most = max(self.most, self.now)
        await self.open.wait()
        await asyncio.sleep(0)
        self.now -= 1
        turns = await policy.sample((), count=count, seed=seed, sampling=SamplingConfig())
        return tuple(Rollout.single((turn,), 1.0) for turn in turns)


class FailingWorkflow(CountingWorkflow):
    """A workflow whose first `calls` calls fail."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    async def run(self, task, policy, *, count, seed):
        self.left -= 1
        if self.left >= 0:
            raise OSError("no route to host")
        return await super().run(task, policy, count=count, seed=seed)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds()` is true, then give pending tasks time to run too far."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  no event is set when it holds
            await asyncio.sleep(0.001)
    for _ in range(100):
        await asyncio.sleep(0)


def task_sampler() -> TaskSampler:
    return split(TasksConfig(train=Addition(), held_out=0), seed=0)[0]


def batch_queue(
    workflow,
    policy,
    *,
    steps: int | None = 6,
    staleness: int = 0,
    tasks: TaskSampler | None = None,
    rollout: dict[str, Any] | None = None,
    capacity: int = 16,
    **sync: Any,
) -> BatchQueue:
    """Batches of four groups of two rollouts, sampled in process and stored in memory."""
    config = SyncConfig(**{"timeout": 60.0, **sync})
    store = MemoryStore()
    publisher = WeightPublisher(policy, store, config.method or "memory", config.keep, None)
    sampler = Sampler(
        workflow,
        tasks or task_sampler(),
        publisher.open,
        SamplingPlan(steps=steps, groups=4, size=2, staleness=staleness, seed=0, sync=config, capacity=capacity),
        RolloutRunner(RolloutConfig(**(rollout or {})), RequestLimit(100)),
        store,
        timeout_hint="Raise sync.timeout.",
    )
    selector = BatchSelector(store, MemoryConfig(), 0)
    return BatchQueue(store, selector, policy, publisher, config, last_step=0, sampler=sampler)


async def trained(policy: VersionedPolicy, batches: BatchQueue, steps: range, pause: float = 0.0) -> list[Batch]:
    """Batches of `steps`; each step is an update that takes `pause` seconds, of a virtual clock."""
    received = []
    for step in steps:
        received.append(await batches.next(step))
        await asyncio.sleep(pause)
        policy.version += 1
        await batches.publish(step)
    await batches.close()
    return received


def versions(batches: list[Batch]) -> list[int]:
    """Version of the weights that sampled each batch. Asserts that the logged number is the same."""
    assert [batch.numbers["sync/weights"] for batch in batches] == [batch.groups[0].version for batch in batches]
    return [batch.groups[0].version for batch in batches]


@pytest.mark.parametrize(
    ("interval", "offset", "expected"),
    [
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (1, 1, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),  # step k samples by the weights of k - 2
        (1, 2, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (2, 0, [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]),
        (2, 1, [0, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10]),
        (3, 2, [0, 0, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9]),
        (10, 0, [0] * 10 + [10, 10]),
        (10, 1, [0] * 11 + [10]),
    ],
)
@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_fixed_style_sets_the_weights_of_each_batch(interval, offset, expected, method):
    policy = VersionedPolicy()
    batches = batch_queue(CountingWorkflow(), policy, steps=12, staleness=offset, interval=interval, method=method)
    received = run_virtually(trained(policy, batches, range(1, 13)))
    assert versions(received) == expected
    rule = SyncConfig(interval=interval)
    assert [rule.weights_for(batch, offset) for batch in range(1, 13)] == expected
    assert [batch.step for batch in received] == list(range(1, 13))


def test_checkpoint_method_keeps_the_last_published_weights():
    policy = VersionedPolicy()
    batches = batch_queue(CountingWorkflow(), policy, steps=6, method="checkpoint", keep=3)
    run_virtually(trained(policy, batches, range(1, 7)))
    assert policy.saved == ["sync-000003", "sync-000004", "sync-000005"]


def test_on_demand_samples_with_weights_of_the_current_step():
    policy = VersionedPolicy()
    batches = batch_queue(CountingWorkflow(), policy, steps=None, style="on_demand", interval=2)
    received = run_virtually(trained(policy, batches, range(1, 9), pause=0.02))
    assert versions(received) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_on_demand_does_not_deadlock_with_waiting_training():
    policy = VersionedPolicy()

    class Slow(CountingWorkflow):
        async def run(self, task, policy, *, count, seed):
            await asyncio.sleep(0.01)
            return await super().run(task, policy, count=count, seed=seed)

    batches = batch_queue(Slow(), policy, steps=None, style="on_demand", interval=1)
    received = run_virtually(trained(policy, batches, range(1, 5)))
    assert versions(received)[0] == 0
    assert versions(received)[-1] >= 1


def test_on_publish_samples_with_the_last_published_weights():
    policy = VersionedPolicy()
    batches = batch_queue(CountingWorkflow(), policy, steps=None, style="on_publish", interval=2, publish_every=3)
    received = run_virtually(trained(policy, batches, range(1, 9), pause=0.02))
    assert set(versions(received)) <= {0, 3, 6}
    assert versions(received) == sorted(versions(received))
    assert versions(received)[-1] > 0


def test_on_publish_does_not_wait_for_later_publications():
    policy = VersionedPolicy()
    batches = batch_queue(CountingWorkflow(), policy, steps=None, style="on_publish", interval=1, publish_every=100)
    assert versions(run_virtually(trained(policy, batches, range(1, 5)))) == [0, 0, 0, 0]


def test_live_bounds_batches_in_flight_and_records_versions():
    async def main() -> tuple[int, list[Batch]]:
        policy, workflow = VersionedPolicy(), CountingWorkflow()
        batches = batch_queue(workflow, policy, steps=None, style="live", in_flight=2)
        workflow.open.clear()
        first = asyncio.create_task(batches.next(1))
        await until(lambda: len(workflow.seeds) >= 8)
        begun = len(workflow.seeds)
        policy.version = 1
        await batches.publish(1)
        workflow.open.set()
        received = [await first, await batches.next(2)]
        await batches.close()
        return begun, received

    begun, received = asyncio.run(main())
    assert begun == 2 * 4
    assert [group.version for group in received[0].groups] == [0] * 4
    assert {turn.version for group in received[0].groups for rollout in group.rollouts for turn in rollout.turns} == {1}


def test_sampling_pauses_when_the_buffer_is_full():
    async def main() -> int:
        workflow = CountingWorkflow()
        batches = batch_queue(workflow, VersionedPolicy(), steps=None, style="live", in_flight=2, capacity=3)
        await batches.next(1)
        await until(lambda: len(workflow.seeds) >= 16)
        await batches.close()
        return len(workflow.seeds)

    assert asyncio.run(main()) == 4 * 4


def test_next_batch_is_sampled_during_training():
    async def main() -> tuple[int, int]:
        workflow = CountingWorkflow()
        batches = batch_queue(workflow, VersionedPolicy(), staleness=1)
        await batches.next(1)
        workflow.open.clear()
        await until(lambda: len(workflow.seeds) >= 8)
        before = len(workflow.seeds)
        await batches.close()
        return before, workflow.most

    begun, most = asyncio.run(main())
    assert begun == most == 8


def test_workflow_calls_stay_within_concurrency():
    async def main() -> int:
        workflow = CountingWorkflow()
        await batch_queue(workflow, VersionedPolicy(), rollout={"concurrency": 3}).next(1)
        return workflow.most

    assert asyncio.run(main()) == 3


def test_requests_have_distinct_seeds():
    workflow = FailingWorkflow(calls=4)
    batches = batch_queue(workflow, VersionedPolicy(), rollout={"split": 1, "retries": 1})
    run_virtually(trained(VersionedPolicy(), batches, range(1, 7)))
    assert len(set(workflow.seeds)) == len(workflow.seeds) == 6 * 4 * 2


def test_state_holds_batches_sampled_ahead():
    async def main():
        first = batch_queue(CountingWorkflow(), VersionedPolicy(), staleness=2, tasks=(tasks := task_sampler()))
        await first.next(1)
        position = first.position()
        await until(lambda: first.complete_up_to(position))
        state = SavedQueue.model_validate_json((await first.state_at(position)).model_dump_json())
        again = batch_queue(CountingWorkflow(), VersionedPolicy(), staleness=2, tasks=tasks)
        await again.restore(state)
        second = await again.next(2)
        await again.close()
        await first.close()
        return state, second, tasks.cursor

    state, second, cursor = asyncio.run(main())
    assert [batch.step for batch in state.batches] == [2, 3]
    assert second == state.batches[0]
    assert [group.task for group in second.groups] == task_sampler().draw(8)[4:]
    assert cursor == 4 * 4


def test_sampling_stops_at_the_last_step():
    async def main() -> int:
        workflow = CountingWorkflow()
        await batch_queue(workflow, VersionedPolicy(), staleness=3, steps=2).next(1)
        return len(workflow.seeds)

    assert asyncio.run(main()) == 8


def refused(use: Callable[[], Awaitable[object]], match: str) -> None:
    """Assert that awaiting `use()` raises a TinsmithError."""
    with pytest.raises(TinsmithError, match=match):
        asyncio.run(use())


def test_failed_batch_ends_the_run_with_its_first_error():
    workflow = FailingWorkflow(calls=1000)
    refused(
        lambda: batch_queue(workflow, VersionedPolicy(), rollout={"refills": 2}).next(1),
        r"step 1 failed, as in 2 batches before\. The most frequent error, \d+ of \d+ times: OSError: no route",
    )
    assert workflow.left == 1000 - 3 * 4


def test_failed_batch_is_stored_with_its_tasks_and_reported():
    class Second(CountingWorkflow):
        async def run(self, task, policy, *, count, seed):
            if seed in [request_seed(0, 2, group) for group in range(4)]:
                raise OSError("no route to host")
            return await super().run(task, policy, count=count, seed=seed)

    async def main() -> None:
        batches = batch_queue(Second(), VersionedPolicy(), staleness=2, rollout={"refills": 0})
        assert (await batches.next(1)).step == 1
        position = batches.position()
        await until(lambda: batches.complete_up_to(position))
        state = await batches.state_at(position)
        assert (state.sampled, [batch.step for batch in state.unfinished]) == (1, [2, 3])
        assert state.unfinished[0].groups == [None] * 4
        try:
            await batches.next(2)
        finally:
            await batches.close()

    refused(main, "Every rollout of step 2 failed")


def test_failed_batch_is_refilled_from_other_tasks():
    async def main() -> Batch:
        return await batch_queue(FailingWorkflow(calls=4), VersionedPolicy(), tasks=tasks).next(1)

    tasks = task_sampler()
    batch = asyncio.run(main())
    assert (batch.numbers["rollouts/refills"], tasks.cursor) == (1, 8)
    assert [group.task for group in batch.groups] == task_sampler().draw(8)[4:]


def test_waiting_for_weights_times_out():
    async def main() -> None:
        batches = batch_queue(CountingWorkflow(), VersionedPolicy(), staleness=1, timeout=0.01)
        for step in (1, 2, 3):  # without the weights of step 1, which sample batch 3
            await batches.next(step)

    refused(main, "No weights of step 1 within 0.01 seconds")
