"""Checkpoints: names, folders, time to live, and the cleanup at the start."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.service.support.inprocess import Api, api, until
from tinsmith.errors import BadRequest
from tinsmith.service.checkpoints import check_name, check_ttl
from tinsmith.service.storage.records import Checkpoint, Model


@pytest.mark.parametrize("name", ["a", "0001", "step=3,".rstrip(","), "A.b_c-d@e+f", "x" * 200])
def test_check_name_accepts_path_segments(name: str) -> None:
    assert check_name(name) is None


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "ü", "x" * 201, "a\n"])
def test_check_name_rejects_other_names(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot name"):
        check_name(name)


def test_ttl_is_between_an_hour_and_ten_years() -> None:
    assert [check_ttl(ttl) for ttl in (None, 3600, 315_360_000)] == [None] * 3
    for ttl in (0, 3599, 315_360_001):
        with pytest.raises(BadRequest, match="ttl_seconds"):
            check_ttl(ttl)


async def saved(app: Api, model: str, seq: int, **options) -> str:
    return (await app.call("save_weights", {"model_id": model, "seq_id": seq, "path": "a", **options}))["path"]


def test_expired_checkpoint_is_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            path = await saved(app, await app.model(), 1, ttl_seconds=3600)
            [checkpoint] = app.service.store.all(Checkpoint)
            folder = app.service.checkpoints.folder(checkpoint.id)
            assert folder.is_dir()
            assert (await app.post("weights_info", {"tinker_path": path})).status_code == 200
            await app.service.store.update(Checkpoint, checkpoint.id, expires=time.time() + 1.0)
            app.service.sessions.wake()
            await until(lambda: not app.service.store.all(Checkpoint))
            assert (await app.post("weights_info", {"tinker_path": path})).status_code == 404
            assert not folder.exists()

    asyncio.run(main())


def test_overwrite_deletes_the_old_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            path = await saved(app, model, 1, user_metadata={"a": "1"})
            await app.step(model, 2)
            assert await saved(app, model, 3, overwrite=True) == path
            await until(lambda: len(list((tmp_path / "checkpoints").iterdir())) == 1)
            [checkpoint] = app.service.store.all(Checkpoint)
            assert checkpoint.metadata is None
            assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [checkpoint.id]

    asyncio.run(main())


def test_start_removes_partial_folders(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, capture_every=1) as app:
            model = await app.model()
            await app.step(model, 1)
            await saved(app, model, 2)
            [home] = (tmp_path / "journal").iterdir()
        (tmp_path / "checkpoints" / ".half.1234").mkdir()
        (home / ".7-half.writing").mkdir()
        (home / "0-older").mkdir()
        async with api(tmp_path) as app:
            [checkpoint] = app.service.store.all(Checkpoint)
            assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [checkpoint.id]
            record = app.service.store.find(Model, model)
            assert record is not None
            assert [f"{home.name}/{state.name}" for state in home.iterdir()] == [record.captured]

    asyncio.run(main())


def complete_folders(data: Path) -> set[str]:
    """Names of the states and checkpoints on the disk."""
    return {folder.name for kind in ("journal/*", "checkpoints") for folder in data.glob(f"{kind}/[!.]*")}


def folders_of_records(app: Api, model: str) -> set[str]:
    """Names of a model's state and of all checkpoints: what the database has. Threads may still delete older states."""
    record = app.service.store.find(Model, model)
    assert record is not None
    return {Path(str(record.captured)).name, *(each.id for each in app.service.store.all(Checkpoint))}


def test_start_with_another_database_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with api(tmp_path, database=None, capture_every=1) as app:
            model = await app.model(seed=1)
            await app.step(model, 1)
            path = await saved(app, model, 2)
        backup = tmp_path / "backup"
        backup.mkdir()
        for file in tmp_path.glob("tinsmith.db*"):
            file.rename(backup / file.name)
        recorded = folders_of_records(app, model)
        assert complete_folders(tmp_path) >= recorded
        async with api(tmp_path, database=None) as app:
            assert app.service.store.all(Checkpoint) == []
            assert complete_folders(tmp_path) >= recorded
            assert caplog.text.count("1 folder unknown to this database") == 2
        for file in tmp_path.glob("tinsmith.db*"):
            file.unlink()
        for file in backup.iterdir():
            file.rename(tmp_path / file.name)
        async with api(tmp_path, database=None) as app:
            assert "metrics" in await app.step(model, 3)
            load = {"model_id": model, "seq_id": 4, "path": path, "optimizer": True}
            assert (await app.call("load_weights", load))["path"] == path

    asyncio.run(main())


def test_start_with_an_older_database_deletes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, database=None, capture_every=1) as app:
            model = await app.model(seed=1)
            await app.step(model, 1)
        older = (tmp_path / "tinsmith.db").read_bytes()
        async with api(tmp_path, database=None, capture_every=1) as app:
            await app.step(model, 2)
            await saved(app, model, 3)
        recorded = folders_of_records(app, model)
        assert complete_folders(tmp_path) >= recorded
        (tmp_path / "tinsmith.db").write_bytes(older)
        async with api(tmp_path, database=None) as app:
            assert app.service.store.all(Checkpoint) == []
            assert complete_folders(tmp_path) >= recorded

    asyncio.run(main())


def test_start_completes_an_interrupted_deletion(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            await saved(app, await app.model(), 1)
            [checkpoint] = app.service.store.all(Checkpoint)
            await app.service.store.update(Checkpoint, checkpoint.id, deleted=True)
        async with api(tmp_path) as app:
            assert app.service.store.all(Checkpoint) == []
            assert list((tmp_path / "checkpoints").iterdir()) == []

    asyncio.run(main())


def test_stray_files_are_not_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        for folder in ("journal", "journal/s-train-0", "checkpoints"):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / ".DS_Store").write_text("x")
        async with api(tmp_path) as app:
            await saved(app, await app.model(), 1)
            assert len(list(tmp_path.rglob(".DS_Store"))) == 3

    asyncio.run(main())


def test_weights_info_rejects_other_kinds_and_paths(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            await saved(app, model, 1)
            for path, status in (
                (f"tinker://{model}/weights/b", 404),
                (f"tinker://{model}/sampler_weights/a", 404),
                (f"tinker://{model}/ephemeral/a", 400),
                (f"tinker://{model}/weights/a/b", 400),
                ("weights/a", 400),
            ):
                assert (await app.post("weights_info", {"tinker_path": path})).status_code == status

    asyncio.run(main())
