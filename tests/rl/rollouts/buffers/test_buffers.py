"""Every buffer returns what was put into it, also to a second process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.rollouts import buffers
from tinsmith.rl.rollouts.buffers.base import Buffer, Record
from tinsmith.rl.rollouts.buffers.file import FileBuffer, FileConfig
from tinsmith.rl.rollouts.buffers.memory import MemoryBuffer, MemoryConfig
from tinsmith.rl.rollouts.buffers.sql import SqlBuffer, SqlConfig
from tinsmith.rl.rollouts.progress import Batch
from tinsmith.rl.types import Group, Message, Rollout, Task, Turn

MAKERS: dict[str, Callable[[Path], Buffer]] = {
    "memory": lambda _: MemoryBuffer(),
    "file": lambda path: FileBuffer(path / "buffer"),
    "sql": lambda path: SqlBuffer(f"sqlite:///{path}/buffer.db", "run"),
}


def batch(number: int, version: int = 0, groups: int = 1) -> Batch:
    """Batch `number` of equal groups, sampled by weights of `version`; one rollout of each group failed."""
    task = Task(id="t", messages=(Message(role="user", content="ü?", more={"name": "a"}),), extra={"x": [1, None]})
    turn = Turn(prompt=(1, 2), tokens=(3,), logprobs=(-0.1,), text="é", stop="stop", version=version)
    rollouts = (Rollout.single((turn,), 0.1), Rollout(error="broken"))
    group = Group(task=task, rollouts=rollouts, version=version)
    return Batch(step=number, groups=(group,) * groups, cursor=4, numbers={"sync/weights": 1.0})


@pytest.mark.parametrize("kind", MAKERS)
def test_buffer_returns_batches_unchanged(tmp_path, kind):
    async def main() -> None:
        buffer = MAKERS[kind](tmp_path)
        for number in (2, 1, 3):
            await buffer.put(batch(number, version=number))
        await buffer.put(batch(3, version=9))
        assert sorted(await buffer.numbers()) == [1, 2, 3]
        assert await buffer.get(2) == batch(2, version=2)
        assert await buffer.get(3) == batch(3, version=9)
        await buffer.drop([1, 7])
        await buffer.drop([])
        assert sorted(await buffer.numbers()) == [2, 3]
        await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", MAKERS)
def test_note_replaces_the_previous_value(tmp_path, kind):
    async def main() -> None:
        buffer = MAKERS[kind](tmp_path)
        assert await buffer.notes() == {}
        await buffer.note("wanted", "3")
        await buffer.note("weights", "[]")
        await buffer.note("wanted", "")
        assert await buffer.notes() == {"wanted": "", "weights": "[]"}
        await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", MAKERS)
def test_stale_revision_of_a_record_is_not_replaced(tmp_path, kind):
    async def main() -> None:
        buffer = MAKERS[kind](tmp_path)
        assert await buffer.record("tasks") == Record()
        assert not await buffer.replace_record("tasks", 1, "too early")
        assert await buffer.replace_record("tasks", 0, "a\nü")
        assert not await buffer.replace_record("tasks", 0, "too late")
        assert await buffer.record("tasks") == Record(1, "a\nü")
        assert await buffer.replace_record("tasks", 1, "b")
        assert await buffer.record("tasks") == Record(2, "b")
        assert await buffer.notes() == {}
        await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_concurrent_replacements_are_not_lost(tmp_path, kind):
    async def count(buffer: Buffer) -> None:
        for _ in range(20):
            while True:
                record = await buffer.record("tasks")
                if await buffer.replace_record("tasks", record.revision, str(int(record.text or 0) + 1)):
                    break

    async def main() -> None:
        several = [MAKERS[kind](tmp_path) for _ in range(3)]
        await asyncio.gather(*map(count, several))
        assert await several[0].record("tasks") == Record(60, "60")
        for buffer in several:
            await buffer.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_durable_buffers_are_shared_between_processes(tmp_path, kind):
    async def main() -> None:
        first, second = MAKERS[kind](tmp_path), MAKERS[kind](tmp_path)
        assert first.durable
        await first.put(batch(1))
        await first.note("a", "b")
        assert (await second.get(1), await second.notes()) == (batch(1), {"a": "b"})
        await first.close()
        await second.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_cancelled_note_is_written_before_the_next_one(tmp_path, kind):
    async def main() -> None:
        buffer = MAKERS[kind](tmp_path)
        for number in range(30):
            broken_off = asyncio.create_task(buffer.note("a", "old" * 10_000))
            await asyncio.sleep(0.0005 * (number % 3))
            broken_off.cancel()
            await buffer.note("a", f"new {number}")
            assert await buffer.notes() == {"a": f"new {number}"}
        await buffer.close()

    asyncio.run(main())


def test_runs_in_one_database_are_separate(tmp_path):
    async def main() -> None:
        url = f"sqlite:///{tmp_path}/buffer.db"
        first, second = SqlBuffer(url, "one"), SqlBuffer(url, "other")
        await first.put(batch(1))
        await first.note("a", "b")
        assert (list(await second.numbers()), await second.notes()) == ([], {})
        await second.drop([1])
        assert list(await first.numbers()) == [1]
        await first.close()
        await second.close()

    asyncio.run(main())


def test_partially_written_files_are_ignored(tmp_path):
    buffer = FileBuffer(tmp_path)
    (tmp_path / "batch-000001.json.1f0e.part").write_text('{"step": 1, "gro')
    (tmp_path / "note-wanted.json.1f0e.part").write_text("{")
    assert list(asyncio.run(buffer.numbers())) == []
    assert asyncio.run(buffer.notes()) == {}


def test_build_makes_the_buffer_of_each_config(tmp_path):
    assert isinstance(buffers.build(MemoryConfig(), tmp_path, "run"), MemoryBuffer)
    assert isinstance(buffers.build(FileConfig(), tmp_path, "run"), FileBuffer)
    assert (tmp_path / "buffer").is_dir()
    buffers.build(FileConfig(path=str(tmp_path / "there")), tmp_path, "run")
    assert (tmp_path / "there").is_dir()
    made = buffers.build(SqlConfig(url=f"sqlite:///{tmp_path}/b.db"), tmp_path, "run")
    assert isinstance(made, SqlBuffer)
    asyncio.run(made.close())


@pytest.mark.parametrize("url", ["nonsense", "nodialect://x", "sqlite:////no/such/folder/b.db"])
def test_database_that_cannot_be_opened_is_an_error(url):
    with pytest.raises(ConfigError, match=r"buffer\.url: cannot open the database"):
        SqlBuffer(url, "run")
