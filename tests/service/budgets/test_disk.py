"""Disk: what is refused while it is low, and what works when it is full."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from tests.service.support.inprocess import api, pass_body, trained, until
from tinsmith.errors import Busy
from tinsmith.plurals import display_bytes
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.storage.records import Checkpoint, Model

MB = 1 << 20


def test_low_disk_is_logged_once_until_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free, now = [100], [0.0]
    monitor = DiskMonitor(tmp_path, 80, lambda folder: free[0], lambda: now[0])
    monitor.require(20)
    with pytest.raises(Busy, match="nearly full"):
        monitor.require(21)
    free[0] = 10
    assert not monitor.is_low, "a measurement is used for a second"
    now[0] = 1.0
    assert monitor.is_low
    assert monitor.is_low
    with pytest.raises(Busy, match=r"10 B are free .* 80 B are kept in reserve \(disk_reserve\)") as refusal:
        monitor.require()
    assert refusal.value.retry_after_ms == 5000
    monitor.require_for_training(0)  # an eighth of the reserve is left
    with pytest.raises(Busy):
        monitor.require_for_training(1)
    free[0], now[0] = 80, 2.0
    monitor.require()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "are refused" in warnings[0]
    assert "has room again" in warnings[1]


def test_sizes_have_units() -> None:
    assert [display_bytes(size) for size in (0, 999, 1500, 2_000_000, 1 << 30)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.0 MB",
        "1.1 GB",
    ]


def save(model: str, seq: int, name: str | None = None) -> dict:
    named = {"path": name} if name is not None else {"sampling_session_seq_id": seq}
    return {"model_id": model, "seq_id": seq, **named}


def test_low_disk_refuses_saves_and_sessions_but_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without `require` in `check_storage` and in `Sessions.begin`, and `check_payload` in `accept`."""
    monkeypatch.setattr("tinsmith.service.budgets.disk.CACHE_S", 0.0)

    async def main() -> None:
        async with api(tmp_path, disk_reserve=800, custom_losses=True) as app:
            model = await app.model()
            app.service.disk._measure = lambda folder: 799
            refused = [
                await app.post("create_session", {"tags": []}),
                await app.post("save_weights", save(model, 1, "a")),
                await app.post("save_weights_for_sampler", save(model, 1)),
                await app.post("save_weights_external", save(model, 1, "b")),
                await app.post("create_custom_loss", custom_loss(model)),
                await app.send("GET", f"/api/v1/sessions/{model.partition(':')[0]}/trace_export", b""),
            ]
            for answer in refused:
                assert (answer.status_code, answer.headers["retry-after-ms"]) == (429, "5000")
                assert "799 B are free" in answer.json()["detail"]
            assert "metrics" in await app.step(model, 1)
            assert "tinsmith_disk_free_bytes 799.0" in (await app.http.get("/metrics")).text
            app.service.disk._measure = lambda folder: 99
            answer = await app.post("forward_backward", pass_body(model, 2))
            assert (answer.status_code, "99 B are free" in answer.json()["detail"]) == (429, True)
            app.service.disk._measure = lambda folder: 800
            assert "path" in await app.call("save_weights", save(model, 2, "a"))

    asyncio.run(main())


def custom_loss(model: str) -> dict:
    session = model.partition(":")[0]
    node = {"op": "output", "name": "output", "target": "output", "args": [], "kwargs": {}}
    graph = {"format": 1, "nodes": [node]}
    return {"session_id": session, "custom_loss_seq_id": 0, "name": "loss", "inputs": [], "graph": graph}


def test_save_accepted_before_the_disk_was_low_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.budgets.disk.CACHE_S", 0.0)

    async def main() -> None:
        async with api(tmp_path, disk_reserve=800) as app:
            model = await app.model()
            promise = await app.post("save_weights", save(model, 1, "a"))
            app.service.disk._measure = lambda folder: 0
            assert "nearly full" in (await app.result(promise.json())).json()["error"]
            assert not list((tmp_path / "checkpoints").glob("[!.]*"))

    asyncio.run(main())


def fill(folder: Path) -> Path:
    """Leave no free block."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MB, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    assert shutil.disk_usage(folder).free == 0
    return ballast


def test_full_disk_is_emptied_by_deleting_and_finishing(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if rows are deleted before files, if the file for the database is not released, or if heartbeats write."""
    monkeypatch.setattr("tinsmith.service.budgets.disk.CACHE_S", 0.0)
    monkeypatch.setattr("tinsmith.service.budgets.disk.CHECK_S", 0.05)

    async def main() -> None:
        async with api(tmp_path / "calm") as calm, api(small_disk, disk_reserve=8 * MB, database=None) as app:
            models = [await each.model(seed=1) for each in (calm, app)]
            losses = [await trained(each, model, 1, 3) for each, model in zip((calm, app), models, strict=True)]
            model, other = models[1], await app.model()
            path = (await app.call("save_weights", save(model, 7, "a")))["path"]
            for seq in range(1, 4):
                await app.call("save_weights_for_sampler", save(other, seq))
            await until(lambda: all(version.ready for version in app.service.store.all(Checkpoint)))
            await until((small_disk / "database.reserve").exists)
            ballast = fill(small_disk)
            async with asyncio.timeout(120):
                session = model.partition(":")[0]
                assert (await app.post("session_heartbeat", {"session_id": session})).status_code == 200
                assert (await app.post("create_session", {"tags": []})).status_code == 429
                assert (await app.post("forward_backward", pass_body(model, 8))).status_code == 429
                run, _, name = path.removeprefix("tinker://").partition("/")
                deleted = await app.send("DELETE", f"/api/v1/training_runs/{run}/checkpoints/{name}", b"")
                assert deleted.status_code == 204
                ended = await app.send("POST", f"/api/v1/sessions/{other.partition(':')[0]}/finish", b"{}")
                assert ended.status_code == 204
                await until(lambda: not app.service.store.all(Checkpoint))
                await until(lambda: app.service.model(other, "local").state == "ended")
            ballast.unlink()
            losses[0] += await trained(calm, models[0], 8, 2)
            losses[1] += await trained(app, model, 8, 2)
            assert losses[0] == losses[1]
        async with api(small_disk, disk_reserve=8 * MB, database=None) as app:
            assert not app.service.store.all(Checkpoint)
            assert app.service.store.find(Model, model) is not None

    asyncio.run(main())


def test_file_for_the_database_is_kept_and_released(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, disk_reserve=MB, database=None) as app:
            file = tmp_path / "database.reserve"
            await until(lambda: file.exists() and file.stat().st_size == MB // 16)
            assert file.stat().st_blocks * 512 >= MB // 16
            app.service.disk.release_database_file()
            assert not file.exists()
        assert not file.exists()

    asyncio.run(main())


def test_database_on_a_full_disk_releases_the_file(tmp_path: Path) -> None:
    """Fails without the call of `on_full_disk` in `GroupWriter`."""

    async def main() -> None:
        async with api(tmp_path, database=None) as app:
            store, pages, calls = app.service.store, 1, 0

            def release() -> None:
                nonlocal pages, calls
                pages, calls = 1 << 20, calls + 1

            def limit(connection: Any, *_: object) -> None:
                connection.execute(f"PRAGMA max_page_count={pages}")  # of every connection: the limit is its own

            store.on_full_disk(release)
            event.listen(store._sync_engine.pool, "checkout", limit)
            for number in range(400):
                await app.post("create_session", {"tags": [f"a tag of session {number}"]})
                if calls:
                    break
            assert calls == 1

    asyncio.run(main())
