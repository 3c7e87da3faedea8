"""Two processes make one run: one samples, one trains, and either may be killed."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.rl.scripted_run import REPLIES, Killed, rows, run, scripted, settings
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.explore import explore
from tinsmith.rl.rollouts import store
from tinsmith.rl.rollouts.queue import BatchQueue
from tinsmith.rl.rollouts.store import SqlStore
from tinsmith.rl.run.loop import train
from tinsmith.testing import ScriptedPolicy


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls the store every 10 ms."""
    monkeypatch.setattr(store, "POLL_SECONDS", 0.01)


def quiet() -> Console:
    return Console(file=io.StringIO())


def sampling(folder: Path, **changes: Any) -> Coroutine[Any, Any, int]:
    """The process that samples."""

    async def connect() -> ScriptedPolicy:
        return ScriptedPolicy(REPLIES, folder / "weights")

    return explore(settings(folder, mode="explore", **changes), connect, quiet())


def training(folder: Path, connect: Any = None, **changes: Any) -> Coroutine[Any, Any, Any]:
    """The process that trains."""
    return train(settings(folder, mode="train", **changes), connect or scripted(folder), quiet())


def together(folder: Path, **changes: Any) -> tuple[int, Any]:
    """Both processes in one event loop: (sampled batches, training state)."""

    async def main() -> tuple[int, Any]:
        async with asyncio.timeout(200):
            return tuple(await asyncio.gather(sampling(folder, **changes), training(folder, **changes)))

    return asyncio.run(main())


def assert_equal_runs(first: Path, second: Path) -> None:
    """Assert that two runs have equal metrics and rollouts."""
    assert rows(first) == rows(second)
    names = {file.name for file in (first / "rollouts").iterdir()}
    assert names == {file.name for file in (second / "rollouts").iterdir()}
    for name in names:
        assert (first / "rollouts" / name).read_text() == (second / "rollouts" / name).read_text()


FILE = {"type": "file"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run in one process with some settings, which is made once."""
    folders: dict[str, Path] = {}

    def folder_of(**changes: Any) -> Path:
        key = json.dumps(changes)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("one")
            run(settings(folders[key], backoff=None, **changes))
        return folders[key]

    return folder_of


def test_last_batch_is_logged_after_the_end_of_training(tmp_path, monkeypatch):
    """Training takes the last batch and ends before the sampler learns that the batch is stored."""
    replace, run_in_thread, report = SqlStore.compare_and_set, SqlStore._run_in_thread, BatchQueue._report
    ended, last = threading.Event(), [False]

    async def noting(self: SqlStore, revision: int, state: Any, stored: Any = ()) -> bool:
        last[0] = any(batch.step == 8 for batch in stored)
        return await replace(self, revision, state, stored)

    async def late(self: SqlStore, function: Callable[[], Any]) -> Any:
        waits, last[0] = last[0], False
        return await run_in_thread(self, lambda: (function(), waits and ended.wait(100))[0])

    async def reporting(self: BatchQueue, ended_at: int = 0) -> None:
        await report(self, ended_at)
        if ended_at:
            ended.set()

    monkeypatch.setattr(SqlStore, "compare_and_set", noting)
    monkeypatch.setattr(SqlStore, "_run_in_thread", late)
    monkeypatch.setattr(BatchQueue, "_report", reporting)
    sampled, state = together(tmp_path, buffer=FILE)
    assert (sampled, state.step) == (8, 8)
    assert [row["step"] for row in rows(tmp_path / "explore")] == list(range(1, 9))


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("kind", ["file", "sql"])
def test_two_processes_equal_one_process(tmp_path, one_process, kind, staleness, interval):
    how = {"staleness": staleness, "sync": {"interval": interval, "timeout": 100}}
    buffer = FILE if kind == "file" else {"type": "sql", "url": f"sqlite:///{tmp_path}/buffer.db"}
    sampled, state = together(tmp_path / "two", buffer=buffer, **how)
    assert (sampled, state.step) == (8, 8)
    assert_equal_runs(one_process(**how), tmp_path / "two")
    sampled_rows = [
        json.loads(line) for line in (tmp_path / "two" / "explore" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in sampled_rows] == list(range(1, 9))


def test_every_due_publication_is_made_besides_checkpoints(tmp_path):
    published: list[str] = []

    async def connect(state: str, version: int) -> ScriptedPolicy:
        policy = await scripted(tmp_path)(state, version)
        keep = policy.save_for_sampling

        async def telling(name: str, ttl_seconds: int | None = None) -> str:
            published.append(name)
            return await keep(name, ttl_seconds)

        policy.save_for_sampling = telling
        return policy

    changes = {"buffer": FILE, "checkpoint": {"every": 2}, "sync": {"interval": 2, "timeout": 100}}
    changes["algorithm"] = {"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}}

    async def main() -> None:
        await asyncio.gather(sampling(tmp_path, **changes), training(tmp_path, connect, **changes))

    asyncio.run(main())
    assert published == ["sync-000000", "sync-000002", "sync-000004", "sync-000006", "sync-000008", "final"]


@pytest.mark.parametrize(("at", "calls"), [("train", 0), ("train", 4), ("save", 1), ("save_for_sampling", 3)])
def test_killed_trainer_resumes_with_a_running_sampler(tmp_path, one_process, at, calls):
    how = {"staleness": 1, "sync": {"timeout": 100}}
    left = [calls]

    async def connect(state: str, version: int) -> ScriptedPolicy:
        policy = await scripted(tmp_path / "two")(state, version)
        method = getattr(policy, at)

        async def deadly(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return await method(*args, **kwargs)

        setattr(policy, at, deadly)
        return policy

    async def main() -> Any:
        sampler = asyncio.create_task(sampling(tmp_path / "two", buffer=FILE, **how))
        with pytest.raises(Killed):
            await training(tmp_path / "two", connect, buffer=FILE, **how)
        state = await training(tmp_path / "two", connect, buffer=FILE, **how)
        await sampler
        return state

    assert asyncio.run(main()).step == 8
    assert_equal_runs(one_process(**how), tmp_path / "two")


FILLED = {"filters": [{"type": "reward_std"}], "filter_refills": 20, "group_size": 2, "steps": 6}


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("more", [{"staleness": 1}, FILLED], ids=["ahead", "filled"])
def test_killed_sampler_resumes_with_a_running_trainer(tmp_path, one_process, more, batches, monkeypatch):
    how = {"sync": {"timeout": 100}, **more}
    replace, left = SqlStore.compare_and_set, [batches]

    async def deadly(self: SqlStore, revision: int, state: Any, stored: Any = ()) -> bool:
        left[0] -= bool(stored)
        replaced = await replace(self, revision, state, stored)
        if stored and left[0] == 0:
            raise Killed  # after the batch is stored, before its sampler knows
        return replaced

    monkeypatch.setattr(SqlStore, "compare_and_set", deadly)

    async def main() -> Any:
        trainer = asyncio.create_task(training(tmp_path / "two", buffer=FILE, **how))
        with pytest.raises(Killed):
            await sampling(tmp_path / "two", buffer=FILE, **how)
        await sampling(tmp_path / "two", buffer=FILE, **how)
        return await trainer

    assert asyncio.run(main()).step == how.get("steps", 8)
    assert_equal_runs(one_process(**how), tmp_path / "two")


@pytest.mark.parametrize(
    "sync",
    [
        {"style": "on_demand", "interval": 2},
        {"style": "on_publish", "publish_every": 2},
        {"style": "live", "in_flight": 3},
    ],
    ids=lambda sync: sync["style"],
)
def test_other_styles_finish_within_buffer_capacity(tmp_path, sync):
    sampled, state = together(
        tmp_path, buffer={**FILE, "capacity": 3}, sync={**sync, "timeout": 100}, rollout={"over": {"ratio": 0.3}}
    )
    assert state.step == 8
    assert 8 <= sampled <= 8 + 3
    assert [row["step"] for row in rows(tmp_path) if "reward/mean" in row] == list(range(1, 9))


def refused(use: Callable[[], Coroutine[Any, Any, Any]], match: str) -> None:
    """Assert that awaiting `use()` raises a TinsmithError within 200 seconds."""

    async def main() -> None:
        async with asyncio.timeout(200):
            await use()

    with pytest.raises(TinsmithError, match=match):
        asyncio.run(main())


def test_training_reports_failed_sampling(tmp_path):
    changes = {"buffer": FILE, "rewards": [{"type": "reasoning_gym"}]}

    async def sample_and_train() -> None:
        sampler = asyncio.create_task(sampling(tmp_path, **changes))
        try:
            await training(tmp_path, **changes)
        finally:
            with pytest.raises(TinsmithError, match="Every rollout of step 1 failed"):
                await sampler

    refused(
        sample_and_train,
        r"The process that samples failed: Every rollout of step 1 failed.*is not a task of reasoning-gym",
    )


REPLAY = {**FILE, "replay": {"enable": True, "cooldown": 0}}


def test_training_reports_failed_sampling_with_replay(tmp_path):
    changes = {"buffer": REPLAY, "steps": 3000, "sync": {"style": "live", "timeout": 100}, "eval": {"every": 0}}
    changes["algorithm"] = {"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}}

    class Gone(ScriptedPolicy):
        async def open_checkpoint(self, path: str, version: int) -> Any:
            if version >= 2:
                raise ConnectionError("gone for good")
            return await super().open_checkpoint(path, version)

    async def connect() -> ScriptedPolicy:
        return Gone(REPLIES, tmp_path / "weights")

    async def sample_and_train() -> None:
        sampler = asyncio.create_task(explore(settings(tmp_path, mode="explore", **changes), connect, quiet()))
        try:
            await training(tmp_path, **changes)
        finally:
            with pytest.raises(ConnectionError):
                await sampler

    refused(sample_and_train, "The process that samples failed: gone for good")


def test_each_process_times_out_without_the_other(tmp_path):
    how = {"buffer": FILE, "sync": {"timeout": 0.05}}
    refused(lambda: training(tmp_path / "a", **how), "No batch for step 1 within 0.05 seconds. Check .* mode explore")
    refused(lambda: sampling(tmp_path / "b", **how), "No weights of step 0 within 0.05 seconds. Check .* mode train")


@pytest.mark.parametrize("sync", [{}, {"style": "on_publish"}], ids=["fixed", "on_publish"])
def test_sampling_ends_and_resumes_with_training(tmp_path, sync):
    how = {"buffer": FILE, "sync": {"timeout": 100, **sync}}
    said = io.StringIO()

    async def main(steps: int, more: int, before: str = "") -> int:
        """Train after sampling has said `before`."""

        async def connect() -> ScriptedPolicy:
            return ScriptedPolicy(REPLIES, tmp_path / "weights")

        config = settings(tmp_path, mode="explore", steps=more, **how)
        async with asyncio.timeout(200):
            sampler = asyncio.create_task(explore(config, connect, Console(file=said, width=200)))
            while before not in said.getvalue():  # noqa: ASYNC110  no event is set when it is said
                await asyncio.sleep(0.01)
            await training(tmp_path, steps=steps, **how)
            return await sampler

    assert asyncio.run(main(4, 8)) >= 4
    assert said.getvalue() == "Training ended after step 4; sampling ends too.\n"
    waits = "\nTraining ended after step 4; start it with more steps too.\n"
    assert asyncio.run(main(8, 8, before=waits)) >= 8
    assert said.getvalue().endswith(waits)
    assert [row["step"] for row in rows(tmp_path) if "reward/mean" in row] == list(range(1, 9))


def test_rejects_a_second_sampler_and_other_settings(tmp_path):
    how = {"buffer": FILE, "sync": {"timeout": 100}}

    async def twice() -> None:
        await asyncio.gather(sampling(tmp_path, **how), sampling(tmp_path, **how))

    refused(twice, "Another process is using the run folder")
    with pytest.raises(ConfigError, match="different settings: group_size"):
        asyncio.run(sampling(tmp_path, group_size=2, **how))
    with pytest.raises(ConfigError, match="already holds a run"):
        asyncio.run(sampling(tmp_path, resume=False, **how))


def test_processes_share_only_the_settings_that_both_read(tmp_path):
    shared = {"buffer": FILE, "sync": {"timeout": 100}}
    alone = {"optimizer": {"learning_rate": 0.1}, **shared}

    async def main() -> tuple[int, Any]:
        learned = RunConfig.model_validate(
            {"model": {"name": "scripted"}, "name": "small", "folder": str(tmp_path), "mode": "train", "steps": 4}
            | {"groups_per_step": 3, "group_size": 4, "monitors": [], **alone}
        )
        async with asyncio.timeout(200):
            sampler = sampling(tmp_path, steps=4, **shared)
            return tuple(await asyncio.gather(sampler, train(learned, scripted(tmp_path), quiet())))

    sampled, state = asyncio.run(main())
    assert (sampled, state.step) == (4, 4)
    assert (tmp_path / "run.yaml").exists()
    assert (tmp_path / "explore" / "run.yaml").exists()
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(ConfigError, match=r"explore.run\.yaml belongs to the same run but differs in group_size"):
        asyncio.run(training(tmp_path, group_size=2, **shared))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mode": "train"}, "set buffer.type to file or sql"),
        ({"mode": "explore", "buffer": FILE, "sync": {"method": "memory"}}, "cannot open weights in memory"),
        (
            {"mode": "explore", "buffer": FILE, "resume": "rename"},
            "share the run's folder, so resume cannot be rename",
        ),
        ({"mode": "train", "buffer": FILE, "resume": "rename"}, "to start a new run, set another folder in both files"),
        ({"mode": "bench", "tasks": {"train": {"type": "addition"}, "held_out": 0}, "eval": {}}, "mode bench needs"),
    ],
)
def test_rejects_settings_that_do_not_fit_the_mode(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        settings(tmp_path, **changes)
