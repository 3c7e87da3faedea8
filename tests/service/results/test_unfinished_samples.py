"""UnfinishedSamples: the file of samples in progress outlives its process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.service.results.unfinished_samples import SLACK, UnfinishedSamples


def test_unfinished_samples_are_lost_to_the_next_process(tmp_path: Path) -> None:
    first = UnfinishedSamples(tmp_path / "samples")
    assert first.lost == ()
    for name in "abc":
        first.add(name)
    first.remove(["b", "never opened"])
    second = UnfinishedSamples(tmp_path / "samples")  # opened without closing the first, as after a kill
    assert second.lost == ("a", "c")
    second.remove(["a"])
    assert UnfinishedSamples(tmp_path / "samples").lost == ("c",)


def test_partial_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("+whole\n+ha")
    assert UnfinishedSamples(tmp_path / "samples").lost == ("whole",)


def test_file_does_not_grow_with_finished_samples(tmp_path: Path) -> None:
    unfinished = UnfinishedSamples(tmp_path / "samples")
    unfinished.add("stays")
    for number in range(SLACK):
        unfinished.add(str(number))
        unfinished.remove([str(number)])
    assert len((tmp_path / "samples").read_text().splitlines()) < SLACK + 10
    assert UnfinishedSamples(tmp_path / "samples").lost == ("stays",)


def test_full_disk_is_logged_and_the_file_completed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(out: int, lines: list[str]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tinsmith.service.results.unfinished_samples._append", full)
    monkeypatch.setattr("tinsmith.service.results.unfinished_samples.RETRY_S", 0.0)
    unfinished = UnfinishedSamples(tmp_path / "samples")
    (tmp_path / "samples.new").mkdir()  # rewriting the file fails, too
    for name in "abc":
        unfinished.add(name)
    unfinished.remove(["b"])
    assert [name in unfinished for name in "abc"] == [True, False, True]
    assert len(caplog.records) == 1, "logged once"
    (tmp_path / "samples.new").rmdir()
    unfinished.add("d")
    assert UnfinishedSamples(tmp_path / "samples").lost == ("a", "c", "d")
