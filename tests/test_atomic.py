"""Atomic folders and files: complete or absent, and unchanged when a write fails."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinsmith.atomic import atomic_folder, atomic_write, folder_size, link_folder, shared_folder


def test_atomic_folder_appears_complete_and_replaces_the_old_one(tmp_path: Path) -> None:
    for text in ("first", "second one"):
        with atomic_folder(tmp_path / "deep" / "a") as scratch:
            (scratch / "file").write_text(text)
        assert (tmp_path / "deep" / "a" / "file").read_text() == text
        assert folder_size(tmp_path / "deep" / "a") == len(text)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]


def test_atomic_folder_keeps_the_old_one_on_error(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a") as scratch:
        (scratch / "file").write_text("whole")
    for name in ("a", "b"):
        with pytest.raises(OSError, match="full"):
            write_half(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "whole"


def write_half(folder: Path) -> None:
    with atomic_folder(folder) as scratch:
        (scratch / "file").write_text("ha")
        raise OSError("The disk is full.")


def test_atomic_folder_discards_leftovers_of_a_dead_process(tmp_path: Path) -> None:
    (tmp_path / ".a.writing").mkdir()
    (tmp_path / ".a.writing" / "half").write_text("ha")
    with atomic_folder(tmp_path / "a") as scratch:
        (scratch / "file").write_text("whole")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_atomic_folder_syncs_before_and_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure may lose unsynced writes in any order: files are synced first, then the name."""
    synced: list[tuple[int, bool]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "new" / "a").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with atomic_folder(tmp_path / "new" / "a") as scratch:
        (scratch / "file").write_text("whole")
    folder = tmp_path / "new" / "a"
    expected = {folder / "file": False, folder: False, folder.parent: True, tmp_path: True}
    assert synced == [(place.stat().st_ino, named) for place, named in expected.items()]


def test_atomic_write_syncs_content_then_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the sync of the folder: a power failure could then bring the old file back."""
    synced: list[tuple[bool, bool]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino == tmp_path.stat().st_ino, (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    atomic_write(tmp_path / "a", b"whole")
    assert synced == [(False, False), (True, True)]


def test_atomic_write_sets_the_mode(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", b"secret", mode=0o600)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_atomic_folder_is_absent_when_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="broken"), atomic_folder(tmp_path / "a") as scratch:
        (scratch / "file").write_text("whole")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_linked_folder_outlives_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    (tmp_path / "a").mkdir()
    for name in ("one", "two"):
        (tmp_path / "a" / name).write_text(name)
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    assert link_folder(tmp_path / "a", tmp_path / "b") == 6
    assert link_folder(tmp_path / "a", tmp_path / "c", "one") == 3
    (tmp_path / "a" / "one").unlink()
    assert (tmp_path / "b" / "one").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        link_folder(tmp_path / "a", tmp_path / "d", "one")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["a", "b", "c"]


def _no_links(_source: Path, _to: Path) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_atomic_write_allows_concurrent_writers(tmp_path: Path):
    target = tmp_path / "note.json"
    contents = [bytes([number]) * 50_000 for number in range(8)]

    def write(content: bytes) -> None:
        for _ in range(20):
            atomic_write(target, content)
            assert target.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as writers:
        list(writers.map(write, contents))
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_write_keeps_the_old_file_on_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError("no space left")

    target = tmp_path / "note.json"
    atomic_write(target, b"before")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        atomic_write(target, b"after")
    assert (target.read_bytes(), list(tmp_path.iterdir())) == (b"before", [target])


def test_atomic_write_uses_default_permissions(tmp_path: Path):
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.write_bytes(b"")
    atomic_write(whole, b"")
    assert whole.stat().st_mode == plain.stat().st_mode


def test_shared_folder_is_the_first_that_was_made(tmp_path: Path) -> None:
    with shared_folder(tmp_path / "deep" / "a") as second:
        with shared_folder(tmp_path / "deep" / "a") as first:
            first.mkdir()
            (first / "file").write_text("first")
        second.mkdir()
        (second / "file").write_text("second")
    assert (tmp_path / "deep" / "a" / "file").read_text() == "first"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]
