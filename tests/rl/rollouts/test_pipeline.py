"""Sampling ahead on a virtual clock: no starvation, bounded staleness, every group used once, also after kills."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl.rollouts.test_queue import VersionedPolicy, batch_queue, task_sampler
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.rollouts.queue import QueuePosition, SavedQueue
from tinsmith.rl.types import Rollout
from tinsmith.testing import run_virtually

STEPS, GROUPS = 6, 4


class Timed:
    """A workflow whose rollouts take `seconds(seed)`."""

    def __init__(self, seconds) -> None:
        self.seconds = seconds

    async def run(self, task, policy, *, count, seed):
        await asyncio.sleep(self.seconds(seed))
        turns = await policy.sample((), count=count, seed=seed, sampling=SamplingConfig())
        return tuple(Rollout.single((turn,), 1.0) for turn in turns)


@dataclass
class Trainer:
    """A run that saves after every step, as `DeferredStates` does. Its fields outlive a kill."""

    staleness: int
    seconds: float
    """Time of an update."""
    saved: tuple[int, int, str] = (0, 0, "")
    """Step, cursor and state of the batches at the last checkpoint."""
    trained: dict[int, list[str]] = field(default_factory=dict)
    """Tasks by step; those after a checkpoint are trained on again after a kill."""
    lags: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    async def run(self, workflow, *, stream: int = 0) -> None:
        """Train to the last step, from the last checkpoint."""
        done, cursor, state = self.saved
        tasks = task_sampler()
        tasks.restore(cursor, {})
        policy = VersionedPolicy(done)
        batches = batch_queue(workflow, policy, steps=STEPS, staleness=self.staleness, tasks=tasks)
        await batches.restore(SavedQueue.model_validate_json(state) if state else SavedQueue())
        waiting: list[tuple[int, int, QueuePosition]] = []
        try:
            for step in range(done + 1, STEPS + 1):
                places: set[int] = set()
                if stream:
                    async for part in batches.stream(step, stream):
                        assert not places & part.keys()
                        places |= part.keys()
                        await asyncio.sleep(self.seconds * len(part) / GROUPS)
                batch = await batches.next(step)
                assert batch.step == step
                while waiting and batches.complete_up_to(waiting[0][2]):
                    saved, drawn, position = waiting.pop(0)
                    self.saved = saved, drawn, (await batches.state_at(position)).model_dump_json()
                await asyncio.sleep(self.seconds * (GROUPS - len(places)) / GROUPS)
                self.trained[step] = [group.task.id for group in batch.groups]
                self.lags += [policy.version - group.version for group in batch.groups]
                policy.version += 1
                waiting.append((step, tasks.cursor, batches.position()))
                await batches.publish(step)
                self.ends.append(asyncio.get_running_loop().time())
        finally:
            await batches.close()


def durations(seed: int):
    """Random seconds of rollouts: one in five takes ten times as long."""

    def seconds(request: int) -> float:
        random = np.random.default_rng((seed, request))
        return float(random.exponential(1.0) * (10.0 if random.random() < 0.2 else 1.0))

    return seconds


@settings(max_examples=40, deadline=None)
@given(
    staleness=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    update=st.floats(0.0, 8.0),
    kills=st.lists(st.floats(0.1, 60.0), max_size=3),
    stream=st.sampled_from([0, 1, 3]),
)
def test_every_group_is_trained_on_once_within_the_bound(staleness, seed, update, kills, stream):
    trainer, workflow = Trainer(staleness, update), Timed(durations(seed))

    async def killed_after(seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await trainer.run(workflow, stream=stream)

    for seconds in kills:
        run_virtually(killed_after(seconds))
    run_virtually(trainer.run(workflow, stream=stream))
    expected = [task.id for task in task_sampler().draw(STEPS * GROUPS)]
    assert [task for step in range(1, STEPS + 1) for task in trainer.trained[step]] == expected
    assert max(trainer.lags) <= staleness


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_unfinished_batches_are_completed_after_a_stop(seed):
    """A stop stores finished groups; only the others are sampled again, and no task is drawn twice."""
    calls: list[int] = []

    async def stopped() -> tuple[str, int, int]:
        tasks = task_sampler()
        workflow = Timed(lambda request: calls.append(request) or durations(seed)(request))
        batches = batch_queue(workflow, VersionedPolicy(), steps=STEPS, staleness=2, tasks=tasks)
        await batches.next(1)
        await batches.stop(grace=1.0)
        state = await batches.state_at(batches.position())
        await batches.close()
        finished = sum(len(batch.finished) for batch in state.unfinished) + sum(len(b.groups) for b in state.batches)
        return state.model_dump_json(), tasks.cursor, finished

    async def continued(state: str, cursor: int) -> list[str]:
        tasks = task_sampler()
        tasks.restore(cursor, {})
        policy = VersionedPolicy(1)
        workflow = Timed(lambda request: calls.append(request) or 0.0)
        batches = batch_queue(workflow, policy, steps=STEPS, staleness=2, tasks=tasks)
        await batches.restore(SavedQueue.model_validate_json(state))
        groups = [group for step in (2, 3) for group in (await batches.next(step)).groups]
        await batches.close()
        return [group.task.id for group in groups]

    state, cursor, finished = run_virtually(stopped())
    started = len(calls)
    assert started == 3 * GROUPS
    assert run_virtually(continued(state, cursor)) == [task.id for task in task_sampler().draw(3 * GROUPS)[GROUPS:]]
    again = [call for call in calls[started:] if call in calls[:started]]
    assert len(again) == 2 * GROUPS - finished


def wall_time(staleness: int, sampling: float, update: float, stream: int = 0, seconds=None) -> float:
    """Mean virtual seconds of the steps after the second."""
    trainer = Trainer(staleness, update)
    run_virtually(trainer.run(Timed(seconds or (lambda seed: sampling)), stream=stream))
    return (trainer.ends[-1] - trainer.ends[1]) / (STEPS - 2)


@pytest.mark.parametrize(("sampling", "update"), [(4.0, 3.0), (3.0, 4.0), (1.0, 10.0), (10.0, 1.0)])
def test_step_takes_the_longer_of_sampling_and_training(sampling, update):
    assert wall_time(0, sampling, update) == pytest.approx(sampling + update)
    assert wall_time(1, sampling, update) <= 1.15 * max(sampling, update)


def test_streamed_gradients_overlap_with_sampling():
    def seconds(seed: int) -> float:
        return 1.0 + seed % 4

    plain = wall_time(0, 0.0, 4.0, seconds=seconds)
    assert wall_time(0, 0.0, 4.0, stream=1, seconds=seconds) < plain - 1.0


def test_slow_group_delays_no_step_before_its_own():
    """With staleness 2, batch 3 begins with batch 1, so a group of it may take two more steps than the others."""
    slow = {(task_sampler().draw(12)[8]).id}

    class OneSlow(Timed):
        async def run(self, task, policy, *, count, seed):
            await asyncio.sleep(20.0 if task.id in slow else 1.0)
            turns = await policy.sample((), count=count, seed=seed, sampling=SamplingConfig())
            return tuple(Rollout.single((turn,), 1.0) for turn in turns)

    trainer = Trainer(2, 5.0)
    run_virtually(trainer.run(OneSlow(None)))
    assert trainer.ends[:3] == pytest.approx([6.0, 11.0, 25.0])
    assert sorted(slow)[0] in trainer.trained[3]


def _feasible_orders(groups: int, bound: int, steps: int) -> set[tuple[int, ...]]:
    """Versions of the groups in the order of training, for all orders that keep the bound with all slots in use."""
    orders: set[tuple[int, ...]] = set()

    def take(step: int, outstanding: tuple[int, ...], order: tuple[int, ...]) -> None:
        if step > steps:
            orders.add(order)
            return
        if min(outstanding) < step - 1 - bound:  # a group that was not taken in time
            return
        for chosen in {tuple(sorted(each)) for each in _subsets(outstanding, groups)}:
            left = list(outstanding)
            for version in chosen:
                left.remove(version)
            take(step + 1, tuple(sorted([*left, *[step] * groups])), (*order, *chosen))

    take(1, (0,) * (groups * (bound + 1)), ())
    return orders


def _subsets(values: tuple[int, ...], count: int):
    from itertools import combinations

    return combinations(values, count)


@pytest.mark.parametrize(("groups", "bound"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_bound_allows_only_the_oldest_version_first(groups, bound):
    """Among all orders over enough steps, those that stay within the bound to the end train on versions in order."""
    horizon = bound + 3
    for order in _feasible_orders(groups, bound, horizon + bound + 1):
        assert list(order[: groups * horizon]) == sorted(order[: groups * horizon])
