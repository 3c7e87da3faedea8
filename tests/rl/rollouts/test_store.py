"""Every store returns what was put into it, also to a second process; replacements of its state are never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tinsmith.errors import ConfigError
from tinsmith.rl.rollouts.batch import Batch, BatchInProgress
from tinsmith.rl.rollouts.buffer import FileConfig, MemoryConfig, SqlConfig, open_store
from tinsmith.rl.rollouts.store import Claim, MemoryStore, QueueState, SamplerState, SqlStore, Store, WeightRecord
from tinsmith.rl.types import Group, Message, Rollout, Task, Turn

MAKERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(),
    "disk": lambda path: MemoryStore(SqlStore(f"sqlite:///{path}/disk.db", "run")),
    "sql": lambda path: SqlStore(f"sqlite:///{path}/buffer.db", "run"),
}


def batch(number: int, version: int = 0, groups: int = 1) -> Batch:
    """Batch `number` of equal groups, sampled by weights of `version`; one rollout of each group failed."""
    task = Task(id="t", messages=(Message(role="user", content="ü?", more={"name": "a"}),), extra={"x": [1, None]})
    turn = Turn(prompt=(1, 2), tokens=(3,), logprobs=(-0.1,), text="é", stop="stop", version=version)
    rollouts = (Rollout.single((turn,), 0.1), Rollout(error="broken"))
    group = Group(task=task, rollouts=rollouts, version=version)
    return Batch(step=number, groups=(group,) * groups, numbers={"sync/weights": 1.0})


def with_taken(taken: int) -> Callable[[QueueState], QueueState]:
    """A change of the state."""
    return lambda state: state.model_copy(update={"taken": taken})


@pytest.mark.parametrize("kind", MAKERS)
def test_store_returns_batches_unchanged(tmp_path, kind):
    async def main() -> None:
        store = MAKERS[kind](tmp_path)
        await store.update(with_taken(1), [batch(number, version=number) for number in (2, 1, 3)])
        await store.update(with_taken(2), [batch(3, version=9)])
        assert sorted(await store.numbers()) == [1, 2, 3]
        assert await store.get(2) == batch(2, version=2)
        assert await store.get(3) == batch(3, version=9)
        await store.drop([1, 7])
        await store.drop([])
        assert sorted(await store.numbers()) == [2, 3]
        assert (await store.state()).taken == 2
        await store.close()

    asyncio.run(main())


STATE = QueueState(
    next=3,
    claims={2: Claim(sampler="a", batch=BatchInProgress(step=2, tasks=[batch(1).groups[0].task], seeds=[5]))},
    samplers={"a": SamplerState(owner="x", wants=1), "b": SamplerState(state="failed", reason="ü")},
    cursor=4,
    order={"lanes": [{"0": 0.5}]},
    weights=(WeightRecord(step=1, version=1, path="tinker://a"),),
    settings={"train": {"seed": None}},
)


@pytest.mark.parametrize("kind", MAKERS)
def test_stale_revision_of_the_state_is_not_replaced(tmp_path, kind):
    async def main() -> None:
        store = MAKERS[kind](tmp_path)
        assert await store.read() == (0, QueueState())
        assert not await store.compare_and_set(1, STATE, [batch(1)])
        assert await store.compare_and_set(0, STATE)
        assert not await store.compare_and_set(0, QueueState(), [batch(1)])
        assert await store.read() == (1, STATE)
        assert await store.compare_and_set(1, QueueState(next=9))
        assert await store.read() == (2, QueueState(next=9))
        assert list(await store.numbers()) == []
        await store.close()

    asyncio.run(main())


class Stores(RuleBasedStateMachine):
    """Three processes with a store each, or one store, against a model of its contents."""

    kind: str
    shared: int

    def __init__(self) -> None:
        super().__init__()
        self._folder, self._runner = TemporaryDirectory(), asyncio.Runner()
        self._stores = [MAKERS[self.kind](Path(self._folder.name)) for _ in range(self.shared)]
        self._seen = [(0, QueueState())] * self.shared
        self._revision, self._state, self._batches = 0, QueueState(), dict[int, Batch]()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def _at(self, process: int) -> int:
        return process % self.shared

    @rule(process=st.integers(0, 2))
    def read(self, process: int) -> None:
        self._seen[self._at(process)] = seen = self._run(self._stores[self._at(process)].read())
        assert seen == (self._revision, self._state)

    @rule(process=st.integers(0, 2), taken=st.integers(0, 9), numbers=st.sets(st.integers(1, 5), max_size=2))
    def replace(self, process: int, taken: int, numbers: set[int]) -> None:
        """Replace the state that the process has read last, and store batches with it, or neither."""
        revision, state = self._seen[self._at(process)]
        changed, batches = with_taken(taken)(state), [batch(number, version=taken) for number in sorted(numbers)]
        done = self._run(self._stores[self._at(process)].compare_and_set(revision, changed, batches))
        assert done == (revision == self._revision)
        if done:
            self._revision, self._state = revision + 1, changed
            self._batches |= {each.step: each for each in batches}

    @rule(process=st.integers(0, 2), taken=st.integers(0, 9))
    def update(self, process: int, taken: int) -> None:
        """Replace whatever the newest state is."""
        store, before = self._stores[self._at(process)], self._stores[self._at(process)].changes
        self._state = self._run(store.update(with_taken(taken)))
        self._revision += 1
        assert store.changes == before + 1
        assert self._run(store.update(lambda _: None)) == self._state

    @rule(process=st.integers(0, 2), numbers=st.sets(st.integers(1, 5)))
    def drop(self, process: int, numbers: set[int]) -> None:
        self._run(self._stores[self._at(process)].drop(numbers))
        for number in numbers:
            self._batches.pop(number, None)

    @rule(process=st.integers(0, 2))
    def restart(self, process: int) -> None:
        """A process is killed and started again; a store in memory has then lost all, so it stays."""
        if self.kind == "sql":
            self._run(self._stores[self._at(process)].close())
            self._stores[self._at(process)] = MAKERS[self.kind](Path(self._folder.name))
            self._seen[self._at(process)] = 0, QueueState()

    @invariant()
    def holds_the_batches(self) -> None:
        store = self._stores[-1]
        assert set(self._run(store.numbers())) == self._batches.keys()
        assert all(self._run(store.get(number)) == each for number, each in self._batches.items())

    def teardown(self) -> None:
        for store in self._stores:
            self._run(store.close())
        self._runner.close()
        self._folder.cleanup()


@pytest.mark.parametrize(("kind", "shared"), [("memory", 1), ("disk", 1), ("sql", 3)])
def test_stores_behave_alike(kind, shared):
    machine = type("Machine", (Stores,), {"kind": kind, "shared": shared})
    machine.TestCase.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
    machine.TestCase().runTest()


def test_concurrent_replacements_are_not_lost(tmp_path):
    async def count(store: Store) -> None:
        for _ in range(5):
            await store.update(lambda state: state.model_copy(update={"taken": state.taken + 1}))

    async def main() -> None:
        several = [MAKERS["sql"](tmp_path) for _ in range(3)]
        await asyncio.gather(*(count(store) for store in several for _ in range(2)))
        assert (await several[0].state()).taken == 30
        for store in several:
            await store.close()

    asyncio.run(main())


def test_sql_stores_are_shared_between_processes(tmp_path):
    async def main() -> None:
        first, second = MAKERS["sql"](tmp_path), MAKERS["sql"](tmp_path)
        assert first.durable
        await first.update(with_taken(3), [batch(1)])
        assert (await second.get(1), (await second.state()).taken) == (batch(1), 3)
        await first.close()
        await second.close()

    asyncio.run(main())


def test_cancelled_update_is_written_before_the_next_one(tmp_path):
    async def main() -> None:
        store = MAKERS["sql"](tmp_path)
        for number in range(9):
            broken_off = asyncio.create_task(store.update(with_taken(-1)))
            await asyncio.sleep(0.0005 * (number % 3))
            broken_off.cancel()
            await store.update(with_taken(number))
            assert (await store.state()).taken == number
        await store.close()

    asyncio.run(main())


def test_runs_in_one_database_are_separate(tmp_path):
    async def main() -> None:
        url = f"sqlite:///{tmp_path}/buffer.db"
        first, second = SqlStore(url, "one"), SqlStore(url, "other")
        await first.update(with_taken(3), [batch(1)])
        assert (list(await second.numbers()), await second.state()) == ([], QueueState())
        await second.drop([1])
        assert list(await first.numbers()) == [1]
        await first.close()
        await second.close()

    asyncio.run(main())


def test_store_of_each_config_is_opened(tmp_path):
    sql = SqlConfig(url=f"sqlite:///{tmp_path}/b.db")
    there = FileConfig(path=str(tmp_path / "there"))
    assert isinstance(open_store(MemoryConfig(), tmp_path, "run", shared=False), MemoryStore)
    for config in (FileConfig(), there, sql):
        alone, shared = (open_store(config, tmp_path / "buffer", "run", shared=shared) for shared in (False, True))
        assert isinstance(alone, MemoryStore)
        assert isinstance(shared, SqlStore)
        assert alone.durable
        for store in (alone, shared):
            asyncio.run(store.close())
    assert (tmp_path / "buffer" / "batches.db").is_file()
    assert (tmp_path / "there" / "batches.db").is_file()


@pytest.mark.parametrize("url", ["nonsense", "nodialect://x", "sqlite:////no/such/folder/b.db"])
def test_database_that_cannot_be_opened_is_an_error(url):
    with pytest.raises(ConfigError, match=r"buffer\.url: cannot open the database"):
        SqlStore(url, "run")
