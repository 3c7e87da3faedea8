"""Permissions of the data folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.service.support.inprocess import api, pass_body
from tinsmith.service.budgets.private import make_private
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded


def open_to_others(data: Path) -> set[str]:
    """Files and folders of the server that other users can read, write or enter."""
    entries = [entry for entry in data.rglob("*") if not entry.is_symlink() and entry.stat().st_mode & 0o077]
    return {str(entry.relative_to(data)) for entry in entries}


def test_existing_files_become_private(tmp_path: Path) -> None:
    """Fails without `make_private` at the start."""

    async def train(seq: int) -> None:
        async with api(tmp_path, database=None, capture_every=1) as app:
            model = await app.model()
            await app.post("forward_backward", pass_body(model, 1))
            await app.step(model, 2)
            await app.call("save_weights", {"model_id": model, "seq_id": 3, "path": str(seq)})

    before = os.umask(0o022)
    try:
        asyncio.run(train(1))
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "checkpoints" / "link").symlink_to(tmp_path / "notes.txt")
        assert len(open_to_others(tmp_path)) > 5
        make_private(tmp_path)
        assert open_to_others(tmp_path) == {"notes.txt"}
        assert make_private(tmp_path) == 0
    finally:
        os.umask(before)


def test_server_writes_private_files(tmp_path: Path) -> None:
    """Fails without the umask of `serve`."""
    with embedded(ServeConfig(engine="fake", models=("toy",), data=tmp_path)):
        assert open_to_others(tmp_path) == set()
