"""Which batch is trained on next: in order and once, unless they are used again; the old ones are counted."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from tests.rl.rollouts.buffers.test_buffers import batch
from tests.rl.scripted_run import REPLIES, Killed, breaking, rows, run, settings
from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.scripted import ScriptedPolicy
from tinsmith.rl.rollouts.buffers.memory import MemoryBuffer, MemoryConfig
from tinsmith.rl.rollouts.buffers.replay import BatchSelector, ReplayConfig, SelectorState

T = TypeVar("T")


def with_reader(
    versions: Sequence[int], use: Callable[[BatchSelector, MemoryBuffer, list[float]], Awaitable[T]], **config
) -> T:
    """A buffer of batches 1, 2, … sampled by weights of `versions`; the list holds the time of day."""

    async def main() -> T:
        buffer, now = MemoryBuffer(), [0.0]
        for number, version in enumerate(versions, 1):
            await buffer.put(batch(number, version))
        return await use(BatchSelector(buffer, MemoryConfig(**config), 0, clock=lambda: now[0]), buffer, now)

    return asyncio.run(main())


async def taken(reader: BatchSelector, count: int, version: int = 0) -> list[int | None]:
    """What `count` steps train on, each of which makes a new version."""
    found = [await reader.take(version + step) for step in range(count)]
    return [None if one is None else one.step for one in found]


def test_oldest_first_and_once():
    async def use(reader, buffer, now):
        first = await taken(reader, 4)
        await reader.clear()
        return first, list(await buffer.numbers())

    assert with_reader([0, 1, 2], use) == ([1, 2, 3, None], [])


def test_a_batch_that_is_missing_is_waited_for():
    async def use(reader, buffer, now):
        await buffer.drop([2])
        before = await taken(reader, 2)
        await buffer.put(batch(2))
        return before, await taken(reader, 2)

    assert with_reader([0, 0, 0], use) == ([1, None], [2, 3])


def test_old_groups_are_left_out_and_counted():
    async def use(reader, buffer, now):
        mixed = batch(3, version=4, groups=2)
        old = replace(mixed.groups[1], version=1)
        await buffer.put(replace(mixed, groups=(mixed.groups[0], old)))
        found = await reader.take(5)
        return found.step, [group.version for group in found.groups], found.numbers["buffer/dropped_groups"]

    assert with_reader([0, 2, 4], use, max_staleness=2) == (3, [4], 3.0)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_is_a_least_version(step, bound):
    """Of the weights that step `step` trains, which are of version step - 1: at least max(step - bound - 1, 0)."""

    async def use(reader, buffer, now):
        found = [await reader.take(step - 1) for _ in range(step)]
        return [one.groups[0].version for one in found if one is not None]

    assert with_reader(list(range(step)), use, max_staleness=bound) == list(range(max(step - bound - 1, 0), step))


def test_replay_takes_the_newest_and_least_used():
    async def use(reader, buffer, now):
        return await taken(reader, 8)

    # priorities: 0, 1, 5 at first; each use costs 2
    found = with_reader([0, 1, 5], use, replay={"enable": True, "decay": 2.0, "cooldown": 0.0})
    assert found == [3, 3, 2, 3, 1, 2, 3, 1]


def test_replay_lets_a_batch_rest():
    async def use(reader, buffer, now):
        first = await taken(reader, 3)
        now[0] = 10.0
        return first, await taken(reader, 2, 3)

    how = {"enable": True, "decay": 0.0, "cooldown": 10.0}
    assert with_reader([0, 1], use, replay=how) == ([2, 1, None], [2, 1])


def test_replay_without_a_cooldown_uses_each_once():
    async def use(reader, buffer, now):
        found = await taken(reader, 3)
        await reader.clear()
        return found, list(await buffer.numbers())

    assert with_reader([0, 1], use, replay={"enable": True}) == ([2, 1, None], [])


def test_a_batch_used_once_is_used_no_more_where_the_process_was_killed_before_it_was_dropped():
    async def use(reader, buffer, now):
        await taken(reader, 1)
        again = BatchSelector(buffer, MemoryConfig(replay={"enable": True}), 0)
        again.restore(reader.state)
        found = await taken(again, 2, 1)
        await again.clear()
        return found, list(await buffer.numbers())

    assert with_reader([0, 1], use, replay={"enable": True}) == ([1, None], [])


AGAIN = {"enable": True, "cooldown": 0.0}


def test_weights_that_learned_nothing_from_a_batch_do_not_take_it_again():
    async def use(reader, buffer, now):
        same = [await reader.take(7) for _ in range(3)]
        other = await reader.take(8)
        return [one and one.step for one in (*same, other)], (await reader.take(8, again=True)).step

    assert with_reader([0, 1], use, replay=AGAIN) == ([2, 1, None, 2], 1)
    assert with_reader([0], use, replay=AGAIN) == ([1, None, None, 1], 1)


def test_what_is_left_out_unused_is_not_waited_for():
    async def use(reader, buffer, now):
        await taken(reader, 1, 9)
        return reader.taken

    assert with_reader([3, 0, 2, 1], use, replay={**AGAIN, "size": 2}) == 3


def test_batches_too_old_are_done_with_where_batches_come_again():
    async def use(reader, buffer, now):
        found = await taken(reader, 1, 9)
        await reader.clear()
        return found, reader.taken, list(await buffer.numbers())

    assert with_reader([3, 5], use, replay=AGAIN, max_staleness=1) == ([None], 2, [])


def test_the_limited_priority_ends_after_so_many_uses():
    async def use(reader, buffer, now):
        return await taken(reader, 7)

    how = {"enable": True, "priority": "linear_decay_limited", "limit": 3, "cooldown": 0.0, "decay": 2.0}
    assert with_reader([0, 0], use, replay=how) == [1, 2, 1, 2, 1, 2, None]


def test_the_noise_of_the_limited_priority_has_its_deviation():
    config = ReplayConfig(enable=True, priority="linear_decay_limited", sigma=0.5, decay=2.0, limit=3)
    drawn = [config.value(7, 1, number, 0) for number in range(2000)]
    assert statistics.mean(drawn) == pytest.approx(5.0, abs=0.05)
    assert statistics.stdev(drawn) == pytest.approx(0.5, rel=0.1)
    assert config.value(7, 3, 1, 0) == float("-inf")


def test_replay_keeps_a_bounded_number():
    async def use(reader, buffer, now):
        await taken(reader, 1)
        await reader.clear()
        return sorted(await buffer.numbers())

    assert with_reader([3, 0, 2, 1], use, replay={"enable": True, "size": 2, "cooldown": 0.0}) == [1, 3]


def test_where_it_is_goes_through_a_state():
    async def use(reader, buffer, now):
        first = await taken(reader, 3)
        again = BatchSelector(buffer, MemoryConfig(replay={"enable": True, "cooldown": 0.0}), 0, clock=lambda: 0.0)
        again.restore(SelectorState.model_validate_json(reader.state.model_dump_json()))
        return first, await taken(again, 3, 3), await taken(reader, 3, 3)

    first, again, on = with_reader([0, 1, 5], use, replay={"enable": True, "cooldown": 0.0})
    assert first == [3, 3, 2]
    assert again == on == [3, 1, 2]


REPLAY = {"type": "memory", "replay": {"enable": True, "cooldown": 0.0, "decay": 0.0}}
SIGNAL = {"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}}


def test_a_run_with_replay_trains_on_batches_again(tmp_path):
    run(settings(tmp_path, steps=12, sync={"interval": 4}, buffer=REPLAY, algorithm=SIGNAL))
    uses = [row["buffer/uses"] for row in rows(tmp_path) if "buffer/uses" in row]
    assert len(uses) == 12
    assert max(uses) > 1
    assert max(row["policy/staleness"] for row in rows(tmp_path) if "reward/mean" in row) >= 1


LIVE = {"sync": {"style": "live", "timeout": 5}, "buffer": {"type": "memory", "replay": AGAIN}}


def test_a_step_that_learns_nothing_is_not_made_again_with_the_same_batch(tmp_path):
    never = [{"type": "format", "pattern": "never"}]
    run(settings(tmp_path, steps=20, eval={"every": 0}, rewards=never, **LIVE))
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [row["optim/skipped"] for row in trained] == [1.0] * 20
    assert [row["buffer/uses"] for row in trained] == [1.0] * 20


def test_where_batches_are_for_steps_one_that_taught_nothing_comes_again_before_none_does(tmp_path):
    never = [{"type": "format", "pattern": "never"}]
    one = {"type": "memory", "replay": {**AGAIN, "size": 1}}
    assert run(settings(tmp_path, steps=8, sync={"interval": 4, "timeout": 5}, buffer=one, rewards=never)).step == 8


def fails_from(version: int, folder: Path):
    """A policy whose weights cannot be sampled from `version` on."""

    class Gone(ScriptedPolicy):
        async def snapshot(self):
            snapshot = await super().snapshot()
            if self.version >= version:
                snapshot.sample = self.gone
            return snapshot

        async def gone(self, *asked, **how):
            raise ConnectionError("gone for good")

        async def update(self, *told):
            await asyncio.sleep(0)  # as any server's would
            return await super().update(*told)

    async def connect(state, at):
        return Gone(REPLIES, folder / "weights", state=state, version=at)

    return connect


def test_sampling_that_failed_ends_a_run_that_could_go_on_with_what_it_has(tmp_path):
    with pytest.raises(TinsmithError, match=r"Every rollout of step \d+ failed; .*gone for good"):
        run(settings(tmp_path, steps=500, algorithm=SIGNAL, eval={"every": 0}, **LIVE), fails_from(2, tmp_path))


def test_a_run_that_samples_far_ahead_leaves_out_what_is_old(tmp_path):
    run(
        settings(
            tmp_path,
            steps=6,
            algorithm=SIGNAL,
            sync={"style": "live", "in_flight": 8},
            buffer={"type": "memory", "max_staleness": 1},
        )
    )
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert len(trained) == 6
    assert max(row["policy/staleness_max"] for row in trained) <= 1
    assert sum(row["buffer/dropped_groups"] for row in trained) > 0


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("at", "calls"), [("update", 1), ("update", 4), ("save", 1)])
@pytest.mark.parametrize("kind", ["file", "sql"])
def test_a_run_with_a_durable_buffer_killed_anywhere_ends_the_same(tmp_path, kind, staleness, at, calls):
    run(settings(tmp_path / "whole", staleness=staleness))
    url = f"sqlite:///{tmp_path}/buffer.db"
    buffer = {"type": "file"} if kind == "file" else {"type": "sql", "url": url}
    broken = settings(tmp_path / "broken", staleness=staleness, buffer=buffer)
    with pytest.raises(Killed):
        run(broken, breaking(tmp_path / "broken", calls=calls, at=at))
    assert run(broken).step == 8
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
