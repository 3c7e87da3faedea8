"""Batch selection: in order and once by default, repeatedly with replay, without batches that are too old."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from tests.rl.rollouts.test_store import batch
from tests.rl.scripted_run import REPLIES, Killed, breaking, rows, run, settings
from tinsmith.errors import TinsmithError
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.rollouts.buffer import MemoryConfig
from tinsmith.rl.rollouts.replay import BatchSelector, ReplayConfig, SelectorState
from tinsmith.rl.rollouts.store import MemoryStore, QueueState
from tinsmith.testing import ScriptedPolicy

T = TypeVar("T")


def with_selector(
    versions: Sequence[int], use: Callable[[BatchSelector, MemoryStore, list[float]], Awaitable[T]], **config
) -> T:
    """A store of batches 1, 2, … sampled by weights of `versions`; the list holds the clock's time in seconds."""

    async def main() -> T:
        store, now = MemoryStore(), [0.0]
        await put(store, *(batch(number, version) for number, version in enumerate(versions, 1)))
        return await use(BatchSelector(store, MemoryConfig(**config), 0, clock=lambda: now[0]), store, now)

    return asyncio.run(main())


async def put(store: MemoryStore, *batches: Batch) -> None:
    """Store batches."""
    await store.update(lambda _: QueueState(), batches)


async def taken(selector: BatchSelector, count: int, version: int = 0) -> list[int | None]:
    """Numbers of the batches of `count` steps, each of which makes a new version; None where none is ready."""
    batches = [await selector.take(version + step) for step in range(count)]
    return [None if batch is None else batch.step for batch in batches]


def test_batches_are_selected_once_oldest_first():
    async def use(selector, store, now):
        first = await taken(selector, 4)
        await selector.clear()
        return first, list(await store.numbers())

    assert with_selector([0, 1, 2], use) == ([1, 2, 3, None], [])


def test_missing_batch_blocks_later_ones():
    async def use(selector, store, now):
        await store.drop([2])
        before = await taken(selector, 2)
        await put(store, batch(2))
        return before, await taken(selector, 2)

    assert with_selector([0, 0, 0], use) == ([1, None], [2, 3])


def test_max_staleness_drops_and_counts_old_groups():
    async def use(selector, store, now):
        mixed = batch(3, version=4, groups=2)
        old = replace(mixed.groups[1], version=1)
        await put(store, replace(mixed, groups=(mixed.groups[0], old)))
        selected = await selector.take(5)
        return selected.step, [group.version for group in selected.groups], selected.numbers["buffer/dropped_groups"]

    assert with_selector([0, 2, 4], use, max_staleness=2) == (3, [4], 3.0)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_max_staleness_sets_the_oldest_version(step, bound):
    """Step `step` trains weights of version step - 1; its batch has version max(step - bound - 1, 0) or newer."""

    async def use(selector, store, now):
        batches = [await selector.take(step - 1) for _ in range(step)]
        return [selected.groups[0].version for selected in batches if selected is not None]

    assert with_selector(list(range(step)), use, max_staleness=bound) == list(range(max(step - bound - 1, 0), step))


def test_replay_prefers_new_and_rarely_used_batches():
    async def use(selector, store, now):
        return await taken(selector, 8)

    # priorities: 0, 1, 5 at first; each use costs 2
    steps = with_selector([0, 1, 5], use, replay={"enable": True, "decay": 2.0, "cooldown": 0.0})
    assert steps == [3, 3, 2, 3, 1, 2, 3, 1]


def test_replay_waits_for_the_cooldown():
    async def use(selector, store, now):
        first = await taken(selector, 3)
        now[0] = 10.0
        return first, await taken(selector, 2, 3)

    how = {"enable": True, "decay": 0.0, "cooldown": 10.0}
    assert with_selector([0, 1], use, replay=how) == ([2, 1, None], [2, 1])


def test_replay_without_cooldown_uses_batches_once():
    async def use(selector, store, now):
        steps = await taken(selector, 3)
        await selector.clear()
        return steps, list(await store.numbers())

    assert with_selector([0, 1], use, replay={"enable": True}) == ([2, 1, None], [])


def test_used_batch_is_not_reused_after_a_kill_before_its_drop():
    async def use(selector, store, now):
        await taken(selector, 1)
        again = BatchSelector(store, MemoryConfig(replay={"enable": True}), 0)
        again.restore(selector.state)
        steps = await taken(again, 2, 1)
        await again.clear()
        return steps, list(await store.numbers())

    assert with_selector([0, 1], use, replay={"enable": True}) == ([1, None], [])


AGAIN = {"enable": True, "cooldown": 0.0}


def test_batch_is_not_reused_by_the_same_weights():
    async def use(selector, store, now):
        same = [await selector.take(7) for _ in range(3)]
        other = await selector.take(8)
        return [selected and selected.step for selected in (*same, other)], (await selector.take(8, again=True)).step

    assert with_selector([0, 1], use, replay=AGAIN) == ([2, 1, None, 2], 1)
    assert with_selector([0], use, replay=AGAIN) == ([1, None, None, 1], 1)


def test_batches_beyond_the_replay_size_count_as_taken():
    async def use(selector, store, now):
        await taken(selector, 1, 9)
        return selector.taken

    assert with_selector([3, 0, 2, 1], use, replay={**AGAIN, "size": 2}) == 3


def test_replay_drops_batches_over_max_staleness():
    async def use(selector, store, now):
        steps = await taken(selector, 1, 9)
        await selector.clear()
        return steps, selector.taken, list(await store.numbers())

    assert with_selector([3, 5], use, replay=AGAIN, max_staleness=1) == ([None], 2, [])


def test_linear_decay_limited_stops_after_limit_uses():
    async def use(selector, store, now):
        return await taken(selector, 7)

    how = {"enable": True, "priority": "linear_decay_limited", "limit": 3, "cooldown": 0.0, "decay": 2.0}
    assert with_selector([0, 0], use, replay=how) == [1, 2, 1, 2, 1, 2, None]


def test_linear_decay_limited_noise_has_deviation_sigma():
    config = ReplayConfig(enable=True, priority="linear_decay_limited", sigma=0.5, decay=2.0, limit=3)
    drawn = [config.priority_of(number, version=7, uses=1, seed=0) for number in range(2000)]
    assert statistics.mean(drawn) == pytest.approx(5.0, abs=0.05)
    assert statistics.stdev(drawn) == pytest.approx(0.5, rel=0.1)
    assert config.priority_of(1, version=7, uses=3, seed=0) == float("-inf")


def test_replay_size_bounds_stored_batches():
    async def use(selector, store, now):
        await taken(selector, 1)
        await selector.clear()
        return sorted(await store.numbers())

    assert with_selector([3, 0, 2, 1], use, replay={"enable": True, "size": 2, "cooldown": 0.0}) == [1, 3]


def test_selector_resumes_from_its_state():
    async def use(selector, store, now):
        first = await taken(selector, 3)
        again = BatchSelector(store, MemoryConfig(replay={"enable": True, "cooldown": 0.0}), 0, clock=lambda: 0.0)
        again.restore(SelectorState.model_validate_json(selector.state.model_dump_json()))
        return first, await taken(again, 3, 3), await taken(selector, 3, 3)

    first, again, on = with_selector([0, 1, 5], use, replay={"enable": True, "cooldown": 0.0})
    assert first == [3, 3, 2]
    assert again == on == [3, 1, 2]


REPLAY = {"type": "memory", "replay": {"enable": True, "cooldown": 0.0, "decay": 0.0}}
SIGNAL = {"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}}


def test_run_with_replay_reuses_batches(tmp_path):
    run(settings(tmp_path, steps=12, sync={"interval": 4}, buffer=REPLAY, algorithm=SIGNAL))
    uses = [row["buffer/uses"] for row in rows(tmp_path) if "buffer/uses" in row]
    assert len(uses) == 12
    assert max(uses) > 1
    assert max(row["policy/staleness"] for row in rows(tmp_path) if "reward/mean" in row) >= 1


LIVE = {"sync": {"style": "live", "timeout": 100}, "buffer": {"type": "memory", "replay": AGAIN}}


def test_skipped_step_is_not_repeated_with_its_batch(tmp_path):
    never = [{"type": "format", "pattern": "never"}]
    run(settings(tmp_path, steps=20, eval={"every": 0}, rewards=never, **LIVE))
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [row["optim/skipped"] for row in trained] == [1.0] * 20
    assert [row["buffer/uses"] for row in trained] == [1.0] * 20


def test_fixed_style_reuses_a_skipped_batch_without_others(tmp_path):
    never = [{"type": "format", "pattern": "never"}]
    buffer = {"type": "memory", "replay": {**AGAIN, "size": 1}}
    assert (
        run(settings(tmp_path, steps=8, sync={"interval": 4, "timeout": 100}, buffer=buffer, rewards=never)).step == 8
    )


def fails_from(version: int, folder: Path):
    """A policy whose weights cannot be sampled from `version` on."""

    class Gone(ScriptedPolicy):
        async def snapshot(self):
            snapshot = await super().snapshot()
            return snapshot.around(self.gone) if self.version >= version else snapshot

        async def gone(self, *args, **options):
            raise ConnectionError("gone for good")

        async def train(self, *args):
            await asyncio.sleep(0)  # an update of a real server yields too
            return await super().train(*args)

    async def connect(state, at):
        return Gone(REPLIES, folder / "weights", state=state, version=at)

    return connect


def test_sampling_failure_ends_a_run_with_replayable_batches(tmp_path):
    with pytest.raises(TinsmithError, match=r"Every rollout of step \d+ failed.*gone for good"):
        run(settings(tmp_path, steps=500, algorithm=SIGNAL, eval={"every": 0}, **LIVE), fails_from(2, tmp_path))


def test_run_that_samples_ahead_drops_stale_groups(tmp_path):
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
@pytest.mark.parametrize(("at", "calls"), [("train", 1), ("train", 4), ("save", 1)])
@pytest.mark.parametrize("kind", ["file", "sql"])
def test_killed_run_with_durable_buffer_resumes_equally(tmp_path, kind, staleness, at, calls):
    run(settings(tmp_path / "whole", staleness=staleness))
    url = f"sqlite:///{tmp_path}/buffer.db"
    buffer = {"type": "file"} if kind == "file" else {"type": "sql", "url": url}
    broken = settings(tmp_path / "broken", staleness=staleness, buffer=buffer)
    with pytest.raises(Killed):
        run(broken, breaking(tmp_path / "broken", calls=calls, at=at))
    assert run(broken).step == 8
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
