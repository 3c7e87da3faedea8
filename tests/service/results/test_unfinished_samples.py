"""UnfinishedSamples: the file of samples in progress outlives its process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from tinsmith.errors import Busy
from tinsmith.service.results.completion_log import target_of
from tinsmith.service.results.futures import Futures
from tinsmith.service.results.unfinished_samples import ROOM, UnfinishedSamples


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
    for number in range(ROOM // 10):
        unfinished.add(str(number))
        unfinished.remove([str(number)])
    assert (tmp_path / "samples").stat().st_size < ROOM + 10
    assert UnfinishedSamples(tmp_path / "samples").lost == ("stays",)


def test_samples_are_refused_while_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, text: bytes, offset: int) -> None:
        raise OSError(28, "No space left on device")

    unfinished = UnfinishedSamples(tmp_path / "samples")
    unfinished.add("a")
    unfinished.add("b")
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.service.results.unfinished_samples._write_at", full)
        patch.setattr("tinsmith.service.results.unfinished_samples.RETRY_S", 0.0)
        for name in "cd":
            with pytest.raises(Busy, match="data folder cannot be written"):
                unfinished.add(name)
        unfinished.remove(["b"])
        assert [name in unfinished for name in "abcd"] == [True, False, False, False]
        assert len(caplog.records) == 1, "logged once"
    unfinished.add("d")
    assert UnfinishedSamples(tmp_path / "samples").lost == ("a", "d")


def test_lines_find_room_on_a_full_disk(small_disk: Path) -> None:
    """Fails without the zeros that keep room."""
    unfinished = UnfinishedSamples(small_disk / "samples")
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    assert shutil.disk_usage(small_disk).free == 0
    for number in range(1000):
        unfinished.add(f"sample {number}")
    assert len(UnfinishedSamples(small_disk / "samples").lost) == 1000


def test_sample_that_is_submitted_again_stays_unfinished(tmp_path: Path) -> None:
    """The client of a lost sample submits it again before it polls with the cursor after the loss.

    Fails if `Futures` lets the completion log remove any sample. Found by the long run with faults.
    """
    lost = "s:sample:0:7"

    async def main() -> None:
        UnfinishedSamples(tmp_path / "samples").add(lost)
        futures = Futures(1.0, 60.0, UnfinishedSamples(tmp_path / "samples"))
        futures.restore_lost(lambda request_id: True)
        [completion], cursor = await futures.completions.wait_after(target_of(lost), 0, 0)
        assert (completion.request_id, completion.size) == (lost, None)
        assert futures.open(lost, "o", stored=False, logged=True)
        assert await futures.completions.wait_after(target_of(lost), cursor, 0) == ([], cursor)
        assert UnfinishedSamples(tmp_path / "samples").lost == (lost,), "the next process must fail it again"

    asyncio.run(main())
