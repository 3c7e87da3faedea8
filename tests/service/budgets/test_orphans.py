"""Folders that a crash left without a row: deleted at the next start where that is certain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.support.inprocess import api, until
from tinsmith.atomic import atomic_folder
from tinsmith.service.budgets.orphans import UnrecordedFolders
from tinsmith.service.storage.records import Checkpoint, Model


class Killed(Exception):
    """The end of the process."""


def test_orphan_is_deleted_by_its_own_database_only(tmp_path: Path) -> None:
    first, second = UnrecordedFolders(tmp_path / "root", "one"), UnrecordedFolders(tmp_path / "root", "two")
    for name in ("a", "home/b", "c"):
        with first.noted(name):
            (tmp_path / "root" / name).mkdir(parents=True)
    first.recorded("c")
    with pytest.raises(Killed), first.noted("never"):
        raise Killed
    assert second.delete_orphans(lambda name: False) == 0
    assert first.delete_orphans(lambda name: name == "a") == 1
    assert sorted(path.name for path in (tmp_path / "root").rglob("*")) == ["a", "c", "home"]
    assert first.delete_orphans(lambda name: False) == 0


def test_what_a_killed_engine_has_written_is_deleted(tmp_path: Path) -> None:
    """Fails without `remove_unfinished` and `rmtree` in `noted`: only the next start would delete it."""
    folder = tmp_path / "root" / "a"

    def write() -> None:
        with UnrecordedFolders(folder.parent, "one").noted(folder.name):
            with atomic_folder(folder):
                pass
            writer = atomic_folder(folder)
            unfinished.append(writer.__enter__())
            writers.append(writer)  # never ended
            raise Killed

    unfinished: list[Path] = []
    writers: list[object] = []
    with pytest.raises(Killed):
        write()
    assert not unfinished[0].exists()
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("call", ["finish", "cover"])
def test_crash_between_folder_and_row_leaves_nothing(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails without `noted` around the writes of folders. A start before this warned of each orphan, forever."""

    async def main() -> None:
        async with api(tmp_path, capture_every=1) as app:
            model = await app.model()

            async def killed(*args: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(app.service.store, call, killed)
            monkeypatch.setattr(app.service.journal._unrecorded, "recorded", lambda name: None)
            path, body = ("save_weights", {"path": "a"}) if call == "finish" else ("optim_step", {"adam_params": {}})
            await app.post(path, {"model_id": model, "seq_id": 1, **body})
            written = {"finish": "checkpoints/[!.]*", "cover": "journal/*/[!.]*"}[call]
            await until(lambda: bool(list(tmp_path.glob(written))))
            await asyncio.sleep(0.05)
        monkeypatch.undo()
        [orphan] = tmp_path.glob(written)
        async with api(tmp_path, capture_every=1) as app:
            assert not orphan.exists()
            result = await app.result({"request_id": f"{model}:1"})
            assert "error" not in result.json()
            assert len(app.service.store.all(Checkpoint)) == (call == "finish")
        assert "unknown to this database" not in caplog.text

    asyncio.run(main())


def test_interrupted_deletion_continues_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the emptied folder does not stay until the row is deleted."""

    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
            [checkpoint] = app.service.store.all(Checkpoint)

            async def killed(*records: object) -> None:
                raise Killed

            monkeypatch.setattr(app.service.store, "remove", killed)
            with pytest.raises(Killed):
                await app.service.checkpoints.delete(checkpoint)
            assert not app.service.checkpoints.folder(checkpoint.id).exists()
        monkeypatch.undo()
        async with api(tmp_path) as app:
            assert not app.service.store.all(Checkpoint)
            assert app.service.store.find(Model, model) is not None
            assert not list((tmp_path / "checkpoints").glob(".*deleting"))

    asyncio.run(main())
