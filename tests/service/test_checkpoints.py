"""Names, folders and how long they live."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.service.inprocess import Api, api, until
from tinsmith.errors import BadRequest
from tinsmith.service.checkpoints import check_name, check_ttl
from tinsmith.service.storage.records import Checkpoint, Model


@pytest.mark.parametrize("name", ["a", "0001", "step=3,".rstrip(","), "A.b_c-d@e+f", "x" * 200])
def test_names_that_can_end_a_path(name: str) -> None:
    assert check_name(name) is None


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "ü", "x" * 201, "a\n"])
def test_names_that_cannot(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot name"):
        check_name(name)


def test_times_to_live_are_an_hour_to_ten_years() -> None:
    assert [check_ttl(ttl) for ttl in (None, 3600, 315_360_000)] == [None] * 3
    for ttl in (0, 3599, 315_360_001):
        with pytest.raises(BadRequest, match="ttl_seconds"):
            check_ttl(ttl)


async def saved(on: Api, model: str, seq: int, **options) -> str:
    return (await on.call("save_weights", {"model_id": model, "seq_id": seq, "path": "a", **options}))["path"]


def test_what_is_over_its_time_is_deleted_for_good(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            path = await saved(on, await on.model(), 1, ttl_seconds=3600)
            [checkpoint] = on.service.store.all(Checkpoint)
            folder = on.service.checkpoints.folder(checkpoint.id)
            assert folder.is_dir()
            await on.service.store.update(Checkpoint, checkpoint.id, expires=time.time() + 1.0)
            on.service.sessions.wake()
            assert (await on.post("weights_info", {"tinker_path": path})).status_code == 200
            await until(lambda: not on.service.store.all(Checkpoint))
            assert (await on.post("weights_info", {"tinker_path": path})).status_code == 404
            assert not folder.exists()

    asyncio.run(main())


def test_overwriting_deletes_the_old_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            one = await saved(on, model, 1, user_metadata={"a": "1"})
            await on.step(model, 2)
            assert await saved(on, model, 3, overwrite=True) == one
            for _ in range(20):
                await asyncio.sleep(0.01)
            [checkpoint] = on.service.store.all(Checkpoint)
            assert checkpoint.metadata is None
            assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [checkpoint.id]

    asyncio.run(main())


def test_what_was_half_written_is_swept_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, capture_every=1) as on:
            model = await on.model()
            await on.step(model, 1)
            await saved(on, model, 2)
            [home] = (tmp_path / "journal").iterdir()
        (tmp_path / "checkpoints" / ".half.1234").mkdir()
        (home / ".7-half.writing").mkdir()
        (home / "0-older").mkdir()
        async with api(tmp_path) as on:
            [checkpoint] = on.service.store.all(Checkpoint)
            assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [checkpoint.id]
            found = on.service.store.find(Model, model)
            assert found is not None
            assert [f"{home.name}/{state.name}" for state in home.iterdir()] == [found.captured]

    asyncio.run(main())


def test_another_database_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def folders() -> set[Path]:
        return {one.parent for room in ("checkpoints", "journal") for one in (tmp_path / room).rglob("*.safetensors")}

    async def main() -> None:
        async with api(tmp_path, database=None, capture_every=1) as on:
            model = await on.model(seed=1)
            await on.step(model, 1)
            path = await saved(on, model, 2)
        known = tmp_path / "known"
        known.mkdir()
        for file in tmp_path.glob("tinsmith.db*"):
            file.rename(known / file.name)
        there = folders()
        assert there
        async with api(tmp_path, database=None) as on:
            assert on.service.store.all(Checkpoint) == []
            assert folders() == there
            assert caplog.text.count("1 folders in") == 2
        for file in tmp_path.glob("tinsmith.db*"):
            file.unlink()
        for file in known.iterdir():
            file.rename(tmp_path / file.name)
        async with api(tmp_path, database=None) as on:
            assert "metrics" in await on.step(model, 3)
            load = {"model_id": model, "seq_id": 4, "path": path, "optimizer": True}
            assert (await on.call("load_weights", load))["path"] == path

    asyncio.run(main())


def test_an_older_copy_of_the_database_deletes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, database=None, capture_every=1) as on:
            model = await on.model(seed=1)
            await on.step(model, 1)
        older = (tmp_path / "tinsmith.db").read_bytes()
        async with api(tmp_path, database=None, capture_every=1) as on:
            await on.step(model, 2)
            await saved(on, model, 3)
        there = set(tmp_path.glob("journal/*/*")) | set(tmp_path.glob("checkpoints/*"))
        (tmp_path / "tinsmith.db").write_bytes(older)
        async with api(tmp_path, database=None) as on:
            assert on.service.store.all(Checkpoint) == []
            assert set(tmp_path.glob("journal/*/*")) | set(tmp_path.glob("checkpoints/*")) == there

    asyncio.run(main())


def test_a_deletion_that_the_process_died_in_is_finished_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            await saved(on, await on.model(), 1)
            [checkpoint] = on.service.store.all(Checkpoint)
            await on.service.store.update(Checkpoint, checkpoint.id, deleted=True)
        async with api(tmp_path) as on:
            assert on.service.store.all(Checkpoint) == []
            assert list((tmp_path / "checkpoints").iterdir()) == []

    asyncio.run(main())


def test_stray_files_in_the_folders_are_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        for room in ("journal", "journal/s-train-0", "checkpoints"):
            (tmp_path / room).mkdir(parents=True)
            (tmp_path / room / ".DS_Store").write_text("x")
        async with api(tmp_path) as on:
            await saved(on, await on.model(), 1)
            assert len(list(tmp_path.rglob(".DS_Store"))) == 3

    asyncio.run(main())


def test_another_checkpoint_kind_or_path_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            await saved(on, model, 1)
            for path, status in (
                (f"tinker://{model}/weights/b", 404),
                (f"tinker://{model}/sampler_weights/a", 404),
                (f"tinker://{model}/ephemeral/a", 400),
                (f"tinker://{model}/weights/a/b", 400),
                ("weights/a", 400),
            ):
                assert (await on.post("weights_info", {"tinker_path": path})).status_code == status

    asyncio.run(main())
