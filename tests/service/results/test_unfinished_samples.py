"""The file of unfinished samples of samples under way outlives its process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.service.results.unfinished_samples import SLACK, UnfinishedSamples


def test_what_was_open_is_lost_to_the_next_process_and_stays_open(tmp_path: Path) -> None:
    first = UnfinishedSamples(tmp_path / "samples")
    assert first.lost == ()
    for name in "abc":
        first.add(name)
    first.remove(["b", "never opened"])
    second = UnfinishedSamples(tmp_path / "samples")  # the first one was killed: nothing was shut
    assert second.lost == ("a", "c")
    second.remove(["a"])
    assert UnfinishedSamples(tmp_path / "samples").lost == ("c",)


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("+whole\n+ha")
    assert UnfinishedSamples(tmp_path / "samples").lost == ("whole",)


def test_the_file_does_not_grow_with_what_is_closed(tmp_path: Path) -> None:
    unfinished = UnfinishedSamples(tmp_path / "samples")
    unfinished.add("stays")
    for number in range(SLACK):
        unfinished.add(str(number))
        unfinished.remove([str(number)])
    assert len((tmp_path / "samples").read_text().splitlines()) < SLACK + 10
    assert UnfinishedSamples(tmp_path / "samples").lost == ("stays",)


def test_a_full_disk_stops_nothing_and_the_file_is_whole_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(out: int, lines: list[str]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tinsmith.service.results.unfinished_samples._append", full)
    monkeypatch.setattr("tinsmith.service.results.unfinished_samples.RETRY_S", 0.0)
    unfinished = UnfinishedSamples(tmp_path / "samples")
    (tmp_path / "samples.new").mkdir()  # so that it cannot be written anew either
    for name in "abc":
        unfinished.add(name)
    unfinished.remove(["b"])
    assert [one in unfinished for one in "abc"] == [True, False, True]
    assert len(caplog.records) == 1, "logged once"
    (tmp_path / "samples.new").rmdir()
    unfinished.add("d")
    assert UnfinishedSamples(tmp_path / "samples").lost == ("a", "c", "d")
