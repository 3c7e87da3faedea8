"""Batches are begun ahead by a bounded number, used in order, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.errors import TinsmithError
from tinsmith.rl.rollouts import Plan, Rollouts
from tinsmith.rl.sources import Addition
from tinsmith.rl.tasks import Deck, TasksConfig, split
from tinsmith.rl.types import Rollout, Task, Turn


class Counting:
    """A policy that is only a number."""

    version = 0

    async def snapshot(self):
        still = Counting()
        still.version = self.version
        return still


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
        turn = Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text=task.answer, stop="stop", version=policy.version)
        return (Rollout(turns=(turn,), rewards={"policy": 1.0}),) * count


def deck() -> Deck:
    return split(TasksConfig(train=Addition(), held_out=0), seed=0)[0]


def rollouts(
    workflow, policy, *, staleness: int = 0, steps: int = 6, at_once: int = 100, tasks: Deck | None = None
) -> Rollouts:
    plan = Plan(steps=steps, groups=4, size=2, staleness=staleness, seed=0)
    return Rollouts(workflow, tasks or deck(), policy, plan, asyncio.Semaphore(at_once))


def test_batches_come_in_order_with_versions_within_the_bound():
    async def main() -> list[int]:
        policy, versions = Counting(), []
        batches = rollouts(Watched(), policy, staleness=2)
        for step in range(1, 7):
            groups = await batches.next(step)
            versions.append(policy.version - groups[0].version)
            policy.version += 1
        return versions

    assert asyncio.run(main()) == [0, 1, 2, 2, 2, 2]


def test_the_next_batch_is_sampled_while_this_one_is_trained_on():
    async def main() -> tuple[int, int]:
        watched = Watched()
        batches = rollouts(watched, Counting(), staleness=1)
        await batches.next(1)
        watched.open.clear()
        await asyncio.sleep(0.01)
        before = len(watched.seeds)
        await batches.close()
        return before, len(await batches.settle())

    begun, left = asyncio.run(main())
    assert begun == 8
    assert left == 0


def test_no_more_requests_at_once_than_allowed():
    async def main() -> int:
        watched = Watched()
        await rollouts(watched, Counting(), at_once=3).next(1)
        return watched.most

    assert asyncio.run(main()) == 3


def test_every_request_has_its_own_seed():
    async def main() -> list[int]:
        watched = Watched()
        batches = rollouts(watched, Counting())
        for step in range(1, 7):
            await batches.next(step)
        return watched.seeds

    seeds = asyncio.run(main())
    assert len(set(seeds)) == len(seeds) == 24


def test_what_was_begun_ahead_is_handed_over_and_taken_up():
    async def main():
        first = rollouts(Watched(), Counting(), staleness=2, tasks=(tasks := deck()))
        await first.next(1)
        ahead = await first.settle()
        again = rollouts(Watched(), Counting(), staleness=2, tasks=tasks)
        again.restore(ahead)
        return ahead, await again.next(2), tasks.cursor

    ahead, second, cursor = asyncio.run(main())
    assert [batch.step for batch in ahead] == [2, 3]
    assert second == ahead[0].groups
    assert cursor == 4 * 4


def test_nothing_is_begun_beyond_the_last_step():
    async def main() -> int:
        watched = Watched()
        await rollouts(watched, Counting(), staleness=3, steps=2).next(1)
        return len(watched.seeds)

    assert asyncio.run(main()) == 8


def test_a_batch_of_failures_ends_the_run_with_the_first_reason():
    class Failing(Watched):
        async def run(self, task, policy, *, count, seed):
            raise OSError("no route to host")

    with pytest.raises(TinsmithError, match="Every rollout of step 1 failed; the first: OSError: no route to host"):
        asyncio.run(rollouts(Failing(), Counting()).next(1))
