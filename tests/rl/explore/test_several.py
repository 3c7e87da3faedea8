"""Several processes of mode explore sample for one run, in folders of their own, and any of them may be killed.

To break it: let `Sampler._drawn` leave `cursor` as it was, or `Sampler._start_batches` ignore what its name has begun.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.rl.explore.test_explore import assert_equal_runs, quiet, refused
from tests.rl.scripted_run import REPLIES, Killed, run, scripted, settings
from tinsmith.rl.explore import explore
from tinsmith.rl.rollouts import store
from tinsmith.rl.rollouts.sampler import Sampler
from tinsmith.rl.rollouts.store import SqlStore
from tinsmith.rl.run.loop import train
from tinsmith.testing import ScriptedPolicy

ROWS = [{"question": f"What is {number}?", "answer": "0"} for number in range(12)]
TASKS = {"train": {"type": "rows", "data": ROWS}, "held_out": 0}
BASE: dict[str, Any] = {"tasks": TASKS, "eval": {}, "checkpoint": {"every": 1}, "backoff": None}
"""12 tasks, of which 8 steps of 3 take each twice."""
EACH_TWICE = {f"rows/{number}": 2 for number in range(12)}


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls the store every 10 ms."""
    monkeypatch.setattr(store, "POLL_SECONDS", 0.01)


class Machines:
    """A trainer and samplers. Each has a folder of its own; they share a database, and a server's weights."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.folder = tmp_path
        buffer = {"type": "sql", "url": f"sqlite:///{tmp_path}/buffer.db"}
        self.changes = {**BASE, "buffer": buffer, "sync": {"timeout": 100}, **changes}

    async def sampler(self, name: str, machine: str = "", **changes: Any) -> int:
        """Sample under `name`, by default on a machine of that name."""

        async def connect() -> ScriptedPolicy:
            return ScriptedPolicy(REPLIES, self.folder / "server")

        values = {**self.changes, "mode": "explore", "sampler": name, **changes}
        return await explore(settings(self.folder / (machine or name), **values), connect, quiet())

    async def trainer(self, **changes: Any) -> Any:
        """Train to the last step."""
        values = {**self.changes, "mode": "train", **changes}
        connect = scripted(self.folder)
        return await train(settings(self.folder / "trainer", **values), connect, quiet())

    def trained(self) -> Counter[str]:
        """How often each task was trained on."""
        files = (self.folder / "trainer" / "rollouts").glob("train-*.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return Counter({task: count // 4 for task, count in Counter(line["task"] for line in lines).items()})

    def sampled(self, machine: str, name: str) -> list[int]:
        """The batches that an sampler has logged."""
        file = self.folder / machine / f"explore-{name}" / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    """Wait until a condition holds, at most a minute."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110  no event is set when it holds
            await asyncio.sleep(0.01)


def asynchronously(work: Callable[[], Any]) -> Any:
    """The result of `work()`, within 200 seconds."""

    async def main() -> Any:
        async with asyncio.timeout(200):
            return await work()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the same run in one process, by its staleness."""

    @cache
    def folder_of(staleness: int) -> Path:
        folder = tmp_path_factory.mktemp("one")
        run(settings(folder, **BASE, staleness=staleness), scripted(folder))
        return folder

    return folder_of


def begin_together(monkeypatch: pytest.MonkeyPatch, names: Collection[str]) -> None:
    """Let no sampler go on with its first batch before each of them has begun one."""
    original, together, waited = Sampler._claim, asyncio.Barrier(len(names)), set[str]()

    async def claim(self: Sampler, number: int) -> Any:
        claimed = await original(self, number)
        if claimed is not None and self._name in names and self._name not in waited:
            waited.add(self._name)
            await together.wait()
        return claimed

    monkeypatch.setattr(Sampler, "_claim", claim)


def test_three_samplers_equal_one_process(tmp_path, alone, monkeypatch):
    machines = Machines(tmp_path, staleness=2)
    names = ("a", "b", "c")
    begin_together(monkeypatch, names)

    async def main() -> list[int]:
        counts, state = await asyncio.gather(asyncio.gather(*map(machines.sampler, names)), machines.trainer())
        assert state.step == 8
        return counts

    assert max(asynchronously(main)) == 8
    assert_equal_runs(alone(2), tmp_path / "trainer")
    batches = [machines.sampled(name, name) for name in names]
    assert sorted(chain(*batches)) == list(range(1, 9))
    assert sorted(min(numbers) for numbers in batches) == [1, 2, 3]


def deadly(monkeypatch: pytest.MonkeyPatch, method: str, sampler: str, call: int, *, before: bool) -> None:
    """Make the call with this number of `method` by an sampler raise Killed, once."""
    original, calls = getattr(Sampler, method), [0]

    async def killed(self: Sampler, *args: Any) -> Any:
        calls[0] += self._name == sampler
        dies = self._name == sampler and calls[0] == call
        if dies and before:
            raise Killed
        result = await original(self, *args)
        if dies:
            raise Killed
        return result

    monkeypatch.setattr(Sampler, method, killed)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("method", "call"), [("join", 1), ("_claim", 2), ("_put", 2)])
def test_killed_sampler_continues_on_another_machine(tmp_path, alone, monkeypatch, method, call, before):
    """Killed before or after it takes its name, claims a batch, or stores one."""
    deadly(monkeypatch, method, "b", call, before=before)
    machines = Machines(tmp_path, staleness=2)

    async def main() -> None:
        training = asyncio.create_task(machines.trainer())
        with pytest.raises(Killed):
            await machines.sampler("b")
        await asyncio.gather(machines.sampler("a"), machines.sampler("b", "another machine"), training)

    asynchronously(main)
    assert machines.trained() == EACH_TWICE
    assert_equal_runs(alone(2), tmp_path / "trainer")


def test_refills_draw_no_task_twice(tmp_path):
    """Groups that filters drop are replaced by other tasks, which no other sampler draws."""
    rows = [{"question": f"What is {number}?", "answer": "0"} for number in range(3000)]
    filled = {"filters": [{"type": "reward_std"}], "filter_refills": 20, "group_size": 2, "staleness": 2}
    tasks = {"train": {"type": "rows", "data": rows}, "held_out": 0}
    machines = Machines(tmp_path, tasks=tasks, **filled)
    drawn: list[str] = []

    async def main() -> None:
        await asyncio.gather(*map(machines.sampler, "abc"), machines.trainer())

    with pytest.MonkeyPatch.context() as patch:
        put = Sampler._put

        async def noted(self: Sampler, batch: Any) -> None:
            drawn.extend(group.task.id for group in batch.groups)
            await put(self, batch)

        patch.setattr(Sampler, "_put", noted)
        asynchronously(main)

    async def cursor() -> int:
        state = await SqlStore(f"sqlite:///{tmp_path}/buffer.db", "small").state()
        assert not state.claims
        return state.cursor

    assert len(drawn) == len(set(drawn)) == asyncio.run(cursor()) > 8 * 3


@pytest.mark.parametrize("style", ["on_publish", "on_demand", "live"])
def test_samplers_of_other_styles_take_each_task_once(tmp_path, style):
    machines = Machines(tmp_path, sync={"style": style, "timeout": 100})
    machines.changes["buffer"] = {**machines.changes["buffer"], "capacity": 3}

    async def main() -> None:
        await asyncio.gather(*map(machines.sampler, "ab"), machines.trainer())

    asynchronously(main)
    assert machines.trained() == EACH_TWICE


def test_stored_batch_of_a_killed_sampler_is_not_repeated(tmp_path, alone, monkeypatch):
    """Killed when batch 2 is stored, and away while the trainer takes and deletes it."""
    deadly(monkeypatch, "_put", "a", 2, before=False)
    machines = Machines(tmp_path, staleness=1)

    async def main() -> None:
        training = asyncio.create_task(machines.trainer())
        with pytest.raises(Killed):
            await machines.sampler("a")
        step = tmp_path / "trainer" / "checkpoints" / "step-000002.json"
        await until(lambda: asyncio.to_thread(step.exists))
        await machines.sampler("a", "another machine")
        await training

    asynchronously(main)
    assert machines.sampled("a", "a") == [1, 2]
    assert machines.sampled("another machine", "a") == list(range(3, 9))
    assert_equal_runs(alone(1), tmp_path / "trainer")


def test_newest_process_of_a_name_takes_over(tmp_path):
    machines = Machines(tmp_path, staleness=1)

    async def main() -> str:
        shared = SqlStore(f"sqlite:///{tmp_path}/buffer.db", "small")
        owners = [""]

        async def new_owner() -> bool:
            """Whether the name belongs to another process than before."""
            state = await shared.state()
            owner = state.samplers["a"].owner if state.samplers else ""
            owners.append(owner)
            return owner != owners[-2]

        first = asyncio.create_task(machines.sampler("a"))
        await until(new_owner)
        second = asyncio.create_task(machines.sampler("a", "another machine"))
        await until(new_owner)
        await shared.close()
        await machines.trainer()
        await second
        (error,) = await asyncio.gather(first, return_exceptions=True)
        return str(error)

    assert "mode explore with the name a has taken over" in asynchronously(main)
    assert machines.trained() == EACH_TWICE


def test_settings_are_compared_through_the_buffer(tmp_path):
    machines = Machines(tmp_path, sync={"timeout": 0.05})
    refused(lambda: machines.sampler("a"), "No weights of step 0")
    refused(lambda: machines.sampler("b", seed=1), "explore-a of this run differs in seed")
    refused(lambda: machines.sampler("b", groups_per_step=2), "explore-a of this run differs in groups_per_step")
    refused(lambda: machines.trainer(group_size=2), "explore-a of this run differs in group_size")
    fewer = {"train": {"type": "rows", "data": ROWS[:9]}, "held_out": 0}
    refused(lambda: machines.sampler("b", tasks=fewer), "explore-a of this run differs in tasks")


def test_trainer_refuses_the_buffer_of_another_run(tmp_path):
    machines = Machines(tmp_path)

    async def main() -> None:
        await asyncio.gather(machines.sampler("a"), machines.trainer())

    asynchronously(main)
    (tmp_path / "trainer").rename(tmp_path / "earlier")
    refused(machines.trainer, "Batch 1 is not in the buffer any more: another run")


def test_samplers_of_one_machine_share_a_folder(tmp_path):
    machines = Machines(tmp_path, staleness=1)

    async def main() -> None:
        await asyncio.gather(machines.sampler("a", "one"), machines.sampler("b", "one"), machines.trainer())

    asynchronously(main)
    assert sorted([*machines.sampled("one", "a"), *machines.sampled("one", "b")]) == list(range(1, 9))


def test_name_is_refused_outside_of_mode_explore(tmp_path):
    with pytest.raises(ValueError, match="sampler is not used with mode: train; set mode to explore"):
        settings(tmp_path, mode="train", sampler="a", buffer={"type": "file"})


def test_late_sampler_finds_nothing_to_do(tmp_path):
    """A process that starts when training has ended ends too."""
    machines = Machines(tmp_path)

    async def main() -> None:
        await asyncio.gather(machines.sampler("a"), machines.trainer())
        assert await machines.sampler("b") == 8

    asynchronously(main)
    assert machines.sampled("b", "b") == []
