"""A full disk ends or delays a run, with the reason; files that were being written never break the next start.

To break it: let `JsonlMonitor.required` be False; take `wait_for_room` out of `Run`; let `_up_to` raise.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple

import pytest

from tests.rl.scripted_run import REPLIES, Killed, breaking, rows, run, settings
from tinsmith.errors import TinsmithError
from tinsmith.rl.ending.stop import StopRequested, StopSignal
from tinsmith.rl.run import folder
from tinsmith.rl.run.folder import RunFolder
from tinsmith.testing import ScriptedPolicy

Usage = namedtuple("Usage", "total used free")


def test_full_disk_ends_the_run_with_the_reason(tmp_path, finished):
    class Filling(ScriptedPolicy):
        async def train(self, updates, optimizer, learning_rate):
            if self.version == 4:
                (tmp_path / "rollouts" / "train-000005.part").symlink_to("/dev/full")
            return await super().train(updates, optimizer, learning_rate)

    async def connect(state, version):
        return Filling(REPLIES, tmp_path / "weights", state=state, version=version)

    config = settings(tmp_path, monitors=[{"type": "report"}])
    with pytest.raises(TinsmithError, match="cannot be written: No space left on device"):
        run(config, connect)
    assert run(config).step == 8
    assert rows(tmp_path) == rows(finished)


def test_run_waits_until_the_disk_has_room(tmp_path, monkeypatch, caplog):
    free = [1 << 40, 5 << 20, 5 << 20, 1 << 40]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, free.pop(0) if len(free) > 1 else free[0]))
    monkeypatch.setattr(folder, "_LOOK_SECONDS", 0.01)
    assert run(settings(tmp_path)).step == 8
    waits = [record.getMessage() for record in caplog.records if "the run waits until" in record.getMessage()]
    assert len(waits) == 1
    assert f"{tmp_path} has 5 MB free; the run waits until there are 64" in waits[0]
    assert "has room again" in caplog.text


def test_run_that_waits_for_room_can_be_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 0))
    opened, stop = RunFolder.open(tmp_path, {}), StopSignal()
    stop.request("Ctrl-C")
    with pytest.raises(StopRequested):
        asyncio.run(opened.wait_for_room(stop))
    opened.close()


def test_torn_files_do_not_break_the_next_start(tmp_path, finished):
    config = settings(tmp_path, monitors=[{"type": "report"}])
    with pytest.raises(Killed):
        run(config, breaking(tmp_path, calls=5, at="train"))
    for name in ("metrics.jsonl", "timeline.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "part": "tr')
    (tmp_path / "rollouts" / "train-000007.jsonl").write_text('{"torn')
    (tmp_path / "rollouts" / "train-000004.part").write_text('{"torn')
    (tmp_path / "state.json.0123456789.part").write_text("{")
    assert run(config).step == 8
    assert rows(tmp_path) == rows(finished)
    assert list(tmp_path.rglob("*.part")) == []


def test_damaged_state_is_replaced_by_that_of_a_checkpoint(tmp_path, finished, caplog):
    config = settings(tmp_path, monitors=[{"type": "report"}])
    with pytest.raises(Killed):
        run(config, breaking(tmp_path, calls=5, at="train"))
    (tmp_path / "state.json").write_bytes(b"\0" * 100)
    assert run(config).step == 8
    assert "state.json is damaged; the run continues from" in caplog.text
    assert rows(tmp_path) == rows(finished)
