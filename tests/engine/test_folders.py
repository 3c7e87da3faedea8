"""A folder is there whole or not at all, and what fails leaves the disk as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.engine.folders import size_of, written_whole


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
