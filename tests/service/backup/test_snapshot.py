"""Backups of folders that change in between, and refusals. Each test builds a small service's folder first."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from tests.service.support.databases import beside, url_of
from tests.service.support.inprocess import api, pass_body
from tinsmith.engine.base import LoraSpec
from tinsmith.errors import ConfigError
from tinsmith.service.backup import create
from tinsmith.service.backup.create import back_up
from tinsmith.service.backup.restore import restore
from tinsmith.service.backup.snapshot import StoredFolder, open_snapshot
from tinsmith.service.backup.verify import verify
from tinsmith.service.storage.payload_files import INLINE_BYTES, PayloadFiles
from tinsmith.service.storage.records import Model
from tinsmith.service.storage.tables import CHECKPOINTS, MODELS, REQUESTS, SESSIONS


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data folder of a service that trained a model for two steps, captured once, with a checkpoint of each kind."""

    async def main() -> None:
        async with api(tmp_path / "data", capture_every=1) as app:
            model = await app.model()
            await app.step(model, 1)
            for seq, name in ((2, "save_weights"), (3, "save_weights_for_sampler"), (4, "save_weights_external")):
                await app.call(name, {"model_id": model, "seq_id": seq, "path": "kept"})
            await app.result((await app.post("forward_backward", pass_body(model, 5))).json())

    asyncio.run(main())
    return tmp_path / "data"


def messages(folder: Path, database: str | None = None) -> list[str]:
    return [fault for check in verify(folder, database) for fault in check.faults.values()]


def captured_folder(data: Path) -> Path:
    with beside(data) as engine, engine.connect() as db:
        return data / "journal" / db.execute(select(MODELS.c.captured)).scalar_one()


def test_backup_holds_what_the_records_refer_to(data: Path, tmp_path: Path) -> None:
    made = back_up(data, url_of(data), tmp_path / "backup").manifest
    with beside(data) as engine, engine.connect() as db:
        ids = {row.id for row in db.execute(select(CHECKPOINTS.c.id))}
        count = db.execute(select(func.count()).select_from(REQUESTS)).scalar_one()
    assert len(ids) == 3
    assert {path.split("/")[1] for path in made.files if path.startswith("checkpoints/")} == ids
    assert captured_folder(data).name in {path.split("/")[2] for path in made.files if path.startswith("journal/")}
    assert made.counts["requests"] == count == 6
    assert messages(tmp_path / "backup") == []
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0


def test_rows_move_between_databases(data: Path, tmp_path: Path) -> None:
    """A backup is SQLite in any case; on PostgreSQL it is restored into an empty database."""
    back_up(data, url_of(data), tmp_path / "backup")
    url = url_of(tmp_path / "restored")
    restore(tmp_path / "backup", tmp_path / "restored", url)
    assert messages(tmp_path / "restored", url) == []

    async def main() -> None:
        async with api(tmp_path / "restored") as app:
            [model] = app.service.store.all(Model)
            assert "metrics" in await app.step(model.id, 6)
            await app.tenant("new")  # the ids of keys are counted on

    asyncio.run(main())
    if url is not None:
        with pytest.raises(ConfigError, match="holds rows"):
            restore(tmp_path / "backup", tmp_path / "elsewhere", url)


@pytest.mark.only_on("sqlite")
def test_large_payload_is_in_the_backup(data: Path, tmp_path: Path) -> None:
    """Fails when `copy_database` leaves payloads in the files of the server."""

    async def main() -> None:
        async with api(data, capture_every=1) as app:
            [model] = app.service.store.all(Model)
            body = pass_body(model.id, 6, [5, 6] * 2500)
            assert len(body) > INLINE_BYTES
            await app.result((await app.post("forward_backward", body)).json())

    asyncio.run(main())
    assert messages(data) == []
    [segment] = (data / "payloads").glob("*.payloads")
    back_up(data, None, tmp_path / "backup")
    segment.unlink()
    assert [fault.partition(":")[0] for fault in messages(data)] == ["the payload cannot be read"]
    restore(tmp_path / "backup", tmp_path / "restored", None)
    assert messages(tmp_path / "restored") == []
    with beside(tmp_path / "restored") as engine, engine.connect() as db:
        payload = db.execute(select(REQUESTS.c.payload).where(REQUESTS.c.seq == 6)).scalar_one()
        assert len(payload) > INLINE_BYTES


@pytest.mark.only_on("sqlite")
def test_state_replaced_during_a_backup_is_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when `_collect` does not read a newer transaction after a folder was missing."""
    link, calls = create._link_folder, []

    def replace_first(root: Path, staging: Path, folder: create.StoredFolder) -> bool:
        if not calls:  # the server adopts another state now, and deletes this one
            old = captured_folder(root)
            new = old.with_name("9-newer")
            shutil.copytree(old, new)
            with beside(root) as engine, engine.begin() as db:
                db.execute(update(MODELS).values(captured=f"{new.parent.name}/{new.name}"))
            (old / "adapter_model.safetensors").unlink()
        calls.append(folder.path)
        return link(root, staging, folder)

    monkeypatch.setattr(create, "_link_folder", replace_first)
    made = back_up(data, None, tmp_path / "backup").manifest
    assert {path.split("/")[2] for path in made.files if path.startswith("journal/")} == {"9-newer"}
    assert made.missing == []
    assert messages(tmp_path / "backup") == []


@pytest.mark.only_on("sqlite")
def test_copied_rows_are_those_of_the_transaction(data: Path, tmp_path: Path) -> None:
    """Fails when `copy_database` copies from a connection without the open transaction."""
    with open_snapshot(data, None) as snapshot:
        with beside(data) as engine, engine.begin() as db:
            db.execute(update(SESSIONS).values(display_name="later"))
        snapshot.copy_database(tmp_path, PayloadFiles(data / "payloads"))
    with open_snapshot(tmp_path, None, is_live=False) as copied:
        assert copied.db.execute(select(SESSIONS.c.display_name)).scalar_one() is None


@pytest.mark.only_on("sqlite")
def test_missing_folder_is_named_and_the_rest_is_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "PATIENCE_S", 0.0)
    shutil.rmtree(captured_folder(data))
    made = back_up(data, None, tmp_path / "backup").manifest
    assert made.missing == [str(captured_folder(data).relative_to(data))]
    assert [fault.rpartition(": ")[2] for fault in messages(tmp_path / "backup")] == ["the folder is missing"]


@pytest.mark.only_on("sqlite")
def test_damaged_backup_is_refused(data: Path, tmp_path: Path) -> None:
    """Fails when `restore` does not call `Manifest.faults`."""
    backup = tmp_path / "backup"
    back_up(data, None, backup)
    file = next(backup.glob("checkpoints/*/adapter_model.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    rewrite(file, bytes(content))
    assert messages(backup) == ["has another SHA-256"]
    with pytest.raises(ConfigError, match="has another SHA-256"):
        restore(backup, tmp_path / "restored", None)
    assert not (tmp_path / "restored").exists()


@pytest.mark.only_on("sqlite")
def test_backup_of_an_unknown_version_is_refused(data: Path, tmp_path: Path) -> None:
    """Fails when `restore` finds out after it has copied the files."""
    backup = tmp_path / "backup"
    back_up(data, None, backup)
    manifest = json.loads((backup / "manifest.json").read_text())
    (backup / "manifest.json").write_text(json.dumps(manifest | {"schema": "0003"}))
    with pytest.raises(ConfigError, match=r"The backup .* is of version 0003; this tinsmith knows"):
        restore(backup, tmp_path / "restored", None)
    assert not (tmp_path / "restored").exists()


@pytest.mark.only_on("sqlite")
def test_nothing_but_a_backup_is_replaced(data: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    file = tmp_path / "other" / "file"
    for destination, reason in (
        (tmp_path / "other", "not a backup"),
        (file, "file is not a backup"),
        (data / "inside", "as a whole"),
    ):
        with pytest.raises(ConfigError, match=reason):
            back_up(data, None, destination)
    back_up(data, None, tmp_path / "backup")
    for folder in (data, tmp_path / "other"):
        with pytest.raises(ConfigError, match="is not empty"):
            restore(tmp_path / "backup", folder, None)
    for folder in (tmp_path / "other", tmp_path / "none"):
        with pytest.raises(ConfigError, match="holds no database"):
            back_up(folder, None, tmp_path / "second")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["backup", "data", "other"]
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["file"]


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "not complete"),
        (lambda folder: truncate(folder / "adapter_model.safetensors"), "cannot be read"),
        (lambda folder: set_rank(folder / "adapter_config.json", 8), "rank 8 instead of 4"),
    ],
)
def test_verify_finds_damage_in_a_state(data: Path, damage, fault: str) -> None:
    damage(captured_folder(data))
    [message] = messages(data)
    assert fault in message


@pytest.mark.only_on("sqlite")
def test_verify_finds_lost_payloads_and_unknown_folders(data: Path) -> None:
    with beside(data) as engine, engine.begin() as db:
        db.execute(update(REQUESTS).where(REQUESTS.c.seq == 5).values(payload=None))
    (data / "checkpoints" / "stray").mkdir()
    checks = {check.name: check for check in verify(data)}
    assert list(checks["requests"].faults.values()) == ["the payload is missing"]
    assert list(checks["unknown"].faults) == ["checkpoints/stray"]
    assert checks["unknown"].is_harmless


@pytest.mark.only_on("sqlite")
def test_verify_changes_no_backup(data: Path, tmp_path: Path) -> None:
    """Fails when `open_snapshot` opens the database of a backup as a server does."""
    back_up(data, None, tmp_path / "backup")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "backup").rglob("*")}
    assert messages(tmp_path / "backup") == []
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "backup").rglob("*")} == before


def rewrite(file: Path, content: bytes) -> None:
    """Write another file under the name: other folders may share this one."""
    file.unlink()
    file.write_bytes(content)


def truncate(file: Path) -> None:
    rewrite(file, file.read_bytes()[:-4])


def set_rank(file: Path, rank: int) -> None:
    rewrite(file, json.dumps(json.loads(file.read_text()) | {"r": rank}).encode())


def test_folder_that_is_being_deleted_is_not_complete(tmp_path: Path) -> None:
    """The server deletes its files between their listing and a look at them, as with a link to nothing."""
    stored = StoredFolder(path="c", record="c", lora=LoraSpec(rank=4, seed=1), names=("a",))
    assert not stored.is_complete(tmp_path / "none")
    (tmp_path / "a").write_text("1")
    assert stored.is_complete(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "none")
    assert not stored.is_complete(tmp_path)
