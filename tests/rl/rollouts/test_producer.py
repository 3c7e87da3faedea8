"""Batches are begun ahead by the rule of their style, handed on in order, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tinsmith.errors import TinsmithError
from tinsmith.rl.data.sources import Addition
from tinsmith.rl.data.tasks import TaskSampler, TasksConfig, split
from tinsmith.rl.policy.base import request_seed
from tinsmith.rl.rollouts.batch_source import BufferedBatchSource
from tinsmith.rl.rollouts.buffers.memory import MemoryBuffer, MemoryConfig
from tinsmith.rl.rollouts.buffers.replay import BatchSelector
from tinsmith.rl.rollouts.coordination import CoordinationNotes
from tinsmith.rl.rollouts.producer import Batch, SamplingPlan
from tinsmith.rl.rollouts.runner import RolloutConfig, RolloutRunner
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop
from tinsmith.rl.rollouts.weight_sync import SyncConfig, WeightPublisher, WeightSubscriber
from tinsmith.rl.types import Rollout, Task, Turn


class Counting:
    """A policy that is only a number; it remembers what was kept and let go."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.kept: list[str] = []

    async def snapshot(self):
        return Counting(self.version)

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        self.kept.append(name)
        return name

    async def open_checkpoint(self, path: str, version: int):
        assert path in self.kept
        return Counting(version)

    async def delete_checkpoint(self, path: str) -> None:
        self.kept.remove(path)

    async def sample(self, prompt, *, count, seed, sampling):
        return (Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text="", stop="stop", version=self.version),) * count


class Watched:
    """A workflow that tells how many of it run at once, and takes as long as it is told."""

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
        turns = await policy.sample((), count=count, seed=seed, sampling=None)
        return tuple(Rollout(turns=(turn,), rewards={"policy": 1.0}) for turn in turns)


class Failing(Watched):
    """Every rollout of the first so many calls fails."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    async def run(self, task, policy, *, count, seed):
        self.left -= 1
        if self.left >= 0:
            raise OSError("no route to host")
        return await super().run(task, policy, count=count, seed=seed)


async def until(holds: Callable[[], bool]) -> None:
    """Returns when something has come about, and had time to go too far."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  nothing rings when it holds
            await asyncio.sleep(0.001)
    for _ in range(100):
        await asyncio.sleep(0)


def task_sampler() -> TaskSampler:
    return split(TasksConfig(train=Addition(), held_out=0), seed=0)[0]


def batch_source(
    workflow,
    policy,
    *,
    steps: int | None = 6,
    concurrency: int = 100,
    staleness: int = 0,
    tasks: TaskSampler | None = None,
    rollout: dict[str, Any] | None = None,
    capacity: int = 16,
    **sync: Any,
) -> BufferedBatchSource:
    config = SyncConfig(**{"timeout": 60.0, **sync})
    buffer, notes = MemoryBuffer(), CoordinationNotes(MemoryBuffer())
    publisher = WeightPublisher(policy, notes, config.method or "memory", config.keep, None)
    sampling = SamplingLoop(
        workflow,
        tasks or task_sampler(),
        publisher.open,
        SamplingPlan(steps=steps, groups=4, size=2, staleness=staleness, seed=0, sync=config),
        RolloutRunner(RolloutConfig(**(rollout or {})), asyncio.Semaphore(concurrency)),
        buffer,
        notes,
        capacity=capacity,
        timeout_hint="Raise sync.timeout.",
    )
    selector = BatchSelector(buffer, MemoryConfig(), 0)
    return BufferedBatchSource(buffer, selector, policy, publisher, notes, config, last_step=0, sampling=sampling)


async def trained(policy: Counting, batches: BufferedBatchSource, steps: range, pause: float = 0.0) -> list[Batch]:
    """The batches of some steps; each step is an update that takes `pause` seconds."""
    found = []
    for step in steps:
        found.append(await batches.next(step))
        await asyncio.sleep(pause)
        policy.version += 1
        await batches.mark_trained(step)
    await batches.close()
    return found


def versions(batches: list[Batch]) -> list[int]:
    """Of the weights that sampled each batch; the number that is logged says the same."""
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
def test_fixed_says_which_weights_sample_which_batch(interval, offset, expected, method):
    policy = Counting()
    batches = batch_source(Watched(), policy, steps=12, staleness=offset, interval=interval, method=method)
    found = asyncio.run(trained(policy, batches, range(1, 13)))
    assert versions(found) == expected
    rule = SyncConfig(interval=interval)
    assert [rule.weights_for(batch, offset) for batch in range(1, 13)] == expected
    assert [batch.step for batch in found] == list(range(1, 13))


def test_named_weights_are_published_at_every_interval_and_the_last_few_kept():
    policy = Counting()
    batches = batch_source(Watched(), policy, steps=6, method="checkpoint", keep=3)
    asyncio.run(trained(policy, batches, range(1, 7)))
    assert policy.kept == ["sync-000003", "sync-000004", "sync-000005"]


def test_on_demand_training_gives_its_newest_weights_after_the_step_under_way():
    policy = Counting()
    batches = batch_source(Watched(), policy, steps=None, style="on_demand", interval=2)
    found = asyncio.run(trained(policy, batches, range(1, 9), pause=0.02))
    assert versions(found) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_on_demand_does_not_wait_while_training_waits():
    policy = Counting()

    class Slow(Watched):
        async def run(self, task, policy, *, count, seed):
            await asyncio.sleep(0.01)
            return await super().run(task, policy, count=count, seed=seed)

    batches = batch_source(Slow(), policy, steps=None, style="on_demand", interval=1)
    found = asyncio.run(trained(policy, batches, range(1, 5)))
    assert versions(found)[0] == 0
    assert versions(found)[-1] >= 1


def test_on_publish_takes_what_training_published_last():
    policy = Counting()
    batches = batch_source(Watched(), policy, steps=None, style="on_publish", interval=2, publish_every=3)
    found = asyncio.run(trained(policy, batches, range(1, 9), pause=0.02))
    assert set(versions(found)) <= {0, 3, 6}
    assert versions(found) == sorted(versions(found))
    assert versions(found)[-1] > 0


def test_training_that_waits_for_a_batch_does_not_wait_for_itself():
    policy = Counting()
    batches = batch_source(Watched(), policy, steps=None, style="on_publish", interval=1, publish_every=100)
    assert versions(asyncio.run(trained(policy, batches, range(1, 5)))) == [0, 0, 0, 0]


def test_live_has_a_bounded_number_of_batches_under_way_and_tells_the_drift():
    async def main() -> tuple[int, list[Batch]]:
        policy, watched = Counting(), Watched()
        batches = batch_source(watched, policy, steps=None, style="live", in_flight=2)
        watched.open.clear()
        first = asyncio.create_task(batches.next(1))
        await until(lambda: len(watched.seeds) >= 8)
        begun = len(watched.seeds)
        policy.version = 1
        await batches.mark_trained(1)
        watched.open.set()
        found = [await first, await batches.next(2)]
        await batches.close()
        return begun, found

    begun, found = asyncio.run(main())
    assert begun == 2 * 4
    assert [group.version for group in found[0].groups] == [0] * 4
    assert {turn.version for group in found[0].groups for one in group.rollouts for turn in one.turns} == {1}


def test_sampling_waits_where_enough_batches_wait():
    async def main() -> int:
        watched = Watched()
        batches = batch_source(watched, Counting(), steps=None, style="live", in_flight=2, capacity=3)
        await batches.next(1)
        await until(lambda: len(watched.seeds) >= 16)
        await batches.close()
        return len(watched.seeds)

    assert asyncio.run(main()) == 4 * 4


def test_the_next_batch_is_sampled_while_this_one_is_trained_on():
    async def main() -> tuple[int, int]:
        watched = Watched()
        batches = batch_source(watched, Counting(), staleness=1)
        await batches.next(1)
        watched.open.clear()
        await until(lambda: len(watched.seeds) >= 8)
        before = len(watched.seeds)
        await batches.close()
        return before, watched.most

    begun, most = asyncio.run(main())
    assert begun == most == 8


def test_no_more_requests_concurrency_than_allowed():
    async def main() -> int:
        watched = Watched()
        await batch_source(watched, Counting(), concurrency=3).next(1)
        return watched.most

    assert asyncio.run(main()) == 3


def test_every_request_has_its_own_seed():
    watched = Failing(calls=4)
    batches = batch_source(watched, Counting(), rollout={"split": 1, "retries": 1})
    asyncio.run(trained(Counting(), batches, range(1, 7)))
    assert len(set(watched.seeds)) == len(watched.seeds) == 6 * 4 * 2


def test_what_was_begun_ahead_is_handed_over_and_taken_up():
    async def main():
        first = batch_source(Watched(), Counting(), staleness=2, tasks=(tasks := task_sampler()))
        await first.next(1)
        state = type(await first.capture_state()).model_validate_json((await first.capture_state()).model_dump_json())
        again = batch_source(Watched(), Counting(), staleness=2, tasks=tasks)
        await again.restore(state)
        second = await again.next(2)
        await again.close()
        await first.close()
        return state, second, tasks.cursor

    state, second, cursor = asyncio.run(main())
    assert [batch.step for batch in state.batches] == [2, 3]
    assert second == state.batches[0]
    assert (second.cursor, cursor) == (8, 4 * 4)


def test_nothing_is_begun_beyond_the_last_step():
    async def main() -> int:
        watched = Watched()
        await batch_source(watched, Counting(), staleness=3, steps=2).next(1)
        return len(watched.seeds)

    assert asyncio.run(main()) == 8


def refused(use: Callable[[], Awaitable[object]], match: str) -> None:
    with pytest.raises(TinsmithError, match=match):
        asyncio.run(use())


def test_a_batch_of_failures_ends_the_run_with_the_first_reason():
    watched = Failing(calls=1000)
    refused(
        lambda: batch_source(watched, Counting(), rollout={"refills": 2}).next(1),
        r"Every rollout of step 1 failed; the first error: OSError: no route to host \(2 earlier batches failed too",
    )
    assert watched.left == 1000 - 3 * 4


def test_a_batch_that_failed_is_told_after_a_save_too_and_those_behind_it_are_not_waited_for():
    class Second(Watched):
        async def run(self, task, policy, *, count, seed):
            if seed in [request_seed(0, 2, group) for group in range(4)]:
                raise OSError("no route to host")
            return await super().run(task, policy, count=count, seed=seed)

    async def main() -> None:
        batches = batch_source(Second(), Counting(), staleness=2, rollout={"refills": 0})
        assert (await batches.next(1)).step == 1
        async with asyncio.timeout(10):
            assert (await batches.capture_state()).sampled == 1
        try:
            await batches.next(2)
        finally:
            await batches.close()

    refused(main, "Every rollout of step 2 failed")


def test_a_batch_of_failures_is_sampled_anew_from_other_tasks():
    async def main() -> Batch:
        return await batch_source(Failing(calls=4), Counting(), tasks=tasks).next(1)

    tasks = task_sampler()
    batch = asyncio.run(main())
    assert (batch.numbers["rollouts/refills"], batch.cursor) == (1, 8)
    assert [group.task for group in batch.groups] == task_sampler().draw(8)[4:]


def test_weights_that_never_come_are_not_waited_for_for_ever():
    async def main() -> None:
        notes = CoordinationNotes(MemoryBuffer())
        publisher = WeightPublisher(Counting(), notes, "memory", 1, None)
        weights = WeightSubscriber(notes, publisher.open, 0.01, "Raise sync.timeout.")
        await weights.at(3)

    refused(main, "No weights of step 3 within 0.01 seconds")
