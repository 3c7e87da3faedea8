"""A file that several write at once is always one of their contents, whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinsmith.atomic import write_whole


def test_whoever_writes_at_once_is_in_nobodys_way(tmp_path: Path):
    target = tmp_path / "note.json"
    contents = [bytes([number]) * 50_000 for number in range(8)]

    def write(content: bytes) -> None:
        for _ in range(20):
            write_whole(target, content)
            assert target.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as writers:
        list(writers.map(write, contents))
    assert list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError("no space left")

    target = tmp_path / "note.json"
    write_whole(target, b"before")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(target, b"after")
    assert (target.read_bytes(), list(tmp_path.iterdir())) == (b"before", [target])


def test_others_may_read_it_as_any_file(tmp_path: Path):
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.write_bytes(b"")
    write_whole(whole, b"")
    assert whole.stat().st_mode == plain.stat().st_mode
