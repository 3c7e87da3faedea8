"""A folder is there whole or not at all, and what fails leaves the disk as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tinsmith.atomic import linked, size_of, written_whole


def test_a_folder_appears_when_it_is_whole_and_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    for text in ("first", "second one"):
        with written_whole(tmp_path / "deep" / "a") as scratch:
            (scratch / "file").write_text(text)
        assert (tmp_path / "deep" / "a" / "file").read_text() == text
        assert size_of(tmp_path / "deep" / "a") == len(text)
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["a"]


def test_what_fails_leaves_nothing_and_the_older_one_as_it_was(tmp_path: Path) -> None:
    with written_whole(tmp_path / "a") as scratch:
        (scratch / "file").write_text("whole")
    for name in ("a", "b"):
        with pytest.raises(OSError, match="full"):
            half_write(tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "whole"


def half_write(folder: Path) -> None:
    with written_whole(folder) as scratch:
        (scratch / "file").write_text("ha")
        raise OSError("The disk is full.")


def test_what_a_process_that_died_was_writing_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / ".a.writing").mkdir()
    (tmp_path / ".a.writing" / "half").write_text("ha")
    with written_whole(tmp_path / "a") as scratch:
        (scratch / "file").write_text("whole")
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["file"]


def test_a_folder_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may take whatever was not synced, in any order: so the files first, then the name."""
    synced: list[tuple[int, bool]] = []

    def sync(opened: int) -> None:
        synced.append((os.fstat(opened).st_ino, (tmp_path / "new" / "a").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with written_whole(tmp_path / "new" / "a") as scratch:
        (scratch / "file").write_text("whole")
    folder = tmp_path / "new" / "a"
    expected = {folder / "file": False, folder: False, folder.parent: True, tmp_path: True}
    assert synced == [(place.stat().st_ino, named) for place, named in expected.items()]


def test_a_file_that_cannot_be_synced_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(opened: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="broken"), written_whole(tmp_path / "a") as scratch:
        (scratch / "file").write_text("whole")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_linked_folder_outlives_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    (tmp_path / "a").mkdir()
    for name in ("one", "two"):
        (tmp_path / "a" / name).write_text(name)
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    assert linked(tmp_path / "a", tmp_path / "b") == 6
    assert linked(tmp_path / "a", tmp_path / "c", "one") == 3
    (tmp_path / "a" / "one").unlink()
    assert (tmp_path / "b" / "one").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        linked(tmp_path / "a", tmp_path / "d", "one")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "c"]


def _no_links(_source: Path, _to: Path) -> None:
    raise OSError(errno.EPERM, "no links here")
