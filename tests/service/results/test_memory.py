"""Memory of results: bounded, the rest on disk; and the end of their time."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from tests.service.support.inprocess import until
from tinsmith.service.results import futures as futures_module
from tinsmith.service.results.expiry import Expiry
from tinsmith.service.results.futures import Futures
from tinsmith.service.results.result_files import ResultFiles, ResultPlace
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.storage.records import FutureResult

OWNER = "tenant"
BODY = b"x" * 1000


def resolved(futures: Futures, count: int, *, stored: bool = False) -> list[str]:
    """Ids of resolved requests, with a body of 1,000 bytes each that begins with its number."""
    ids = [f"s:sample:0:{number}" for number in range(count)]
    for number, request_id in enumerate(ids):
        futures.open(request_id, OWNER, stored=stored, logged=not stored)
        futures.resolve(request_id, FutureResult(body=b"%d " % number + BODY, media="m"))
    return ids


def test_oldest_results_go_to_disk_and_come_back(tmp_path: Path) -> None:
    """Break `resolve`: leave out `_spill`. Break `_forget`: leave out `remove`."""

    async def main() -> None:
        files = ResultFiles(tmp_path, file_bytes=20_000)
        futures = Futures(1.0, 3600.0, UnfinishedSamples(tmp_path / "samples"), files=files, memory_bytes=10_000)
        ids = resolved(futures, 100)
        await until(lambda: futures.memory_bytes <= 10_000)
        assert futures.memory_bytes > 5_000
        assert 85_000 < files.size_bytes < 100_000
        for number, request_id in enumerate(ids):
            assert await futures.wait(request_id) == FutureResult(body=b"%d " % number + BODY, media="m")
        futures.acknowledge(ids[:90], OWNER)
        assert files.size_bytes <= 20_000 + 2_000
        assert await futures.wait(ids[-1]) is not None
        futures.acknowledge(ids, OWNER)
        assert (files.size_bytes, futures.memory_bytes) == (0, 0)
        futures.close()

    asyncio.run(main())


def test_stored_results_are_forgotten_when_memory_is_full(tmp_path: Path) -> None:
    """Break `_spill`: leave out the case of stored results."""

    async def main() -> None:
        files = ResultFiles(tmp_path)
        futures = Futures(1.0, 3600.0, UnfinishedSamples(tmp_path / "samples"), files=files, memory_bytes=10_000)
        ids = resolved(futures, 100, stored=True)
        await until(lambda: futures.memory_bytes <= 10_000)
        assert files.size_bytes == 0
        assert not futures.knows(ids[0], OWNER)
        assert await futures.wait(ids[-1]) is not None
        futures.close()

    asyncio.run(main())


def test_results_stay_in_memory_while_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `_spill`: let the error end it."""

    async def main() -> None:
        monkeypatch.setattr(futures_module, "RETRY_S", 0.01)
        files, is_full = ResultFiles(tmp_path), True
        write = files.write

        def fail(*arguments: object) -> None:
            if is_full:
                raise OSError("no space")
            write(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(files, "write", fail)
        futures = Futures(1.0, 3600.0, UnfinishedSamples(tmp_path / "samples"), files=files, memory_bytes=10_000)
        ids = resolved(futures, 20)
        await asyncio.sleep(0.05)
        assert all([await futures.wait(request_id) for request_id in ids])
        assert (files.size_bytes, futures.memory_bytes > 20_000) == (0, True)
        is_full = False
        await until(lambda: futures.memory_bytes <= 10_000)
        futures.acknowledge(ids, OWNER)
        futures.close()

    asyncio.run(main())


def test_each_time_ends_in_its_order_and_can_begin_again() -> None:
    """Break `start`: leave out `stop`, or the time of the timer. Break `_sweep`: leave out `_wait`."""

    async def main() -> None:
        ended: list[str] = []
        expiry = Expiry(ended.append, asyncio.get_running_loop())
        for key, seconds in (("late", 0.2), ("a", 0.1), ("gone", 0.1), ("again", 0.1), ("b", 0.1)):
            expiry.start(key, seconds)
        expiry.stop("gone")
        expiry.start("again", 0.2)
        await until(lambda: len(ended) == 4)
        assert ended == ["a", "b", "late", "again"]
        expiry.start("last", 0.01)
        await until(lambda: ended[-1] == "last")
        expiry.start("never", 0.01)
        expiry.close()
        await asyncio.sleep(0.05)
        assert ended[-1] == "last"

    asyncio.run(main())


def test_nothing_stays_of_the_polls_for_a_result(tmp_path: Path) -> None:
    """A busy service has 12,000 results of samples, each of which was polled for. Break it: keep `waiters`."""

    async def main() -> None:
        futures = Futures(60.0, 3600.0, UnfinishedSamples(tmp_path / "samples"))
        ids = [f"s:sample:0:{number}" for number in range(1000)]
        for request_id in ids:
            futures.open(request_id, OWNER, stored=False, logged=True)
        before = _count_sets()
        polls = [asyncio.create_task(futures.wait(request_id)) for request_id in ids for _ in range(2)]
        await asyncio.sleep(0)
        assert _count_sets() > before + 0.9 * len(ids), "all polls wait"  # sets of other tests may end meanwhile
        for request_id in ids:
            futures.resolve(request_id, FutureResult(body=BODY))
        assert [result.body for result in await asyncio.gather(*polls) if result] == [BODY] * len(polls)
        del polls
        assert _count_sets() < before + len(ids) / 10
        assert all([await futures.wait(request_id) for request_id in ids])
        futures.close()

    asyncio.run(main())


def _count_sets() -> int:
    gc.collect()
    return sum(type(each) is set for each in gc.get_objects())


def test_result_that_is_read_keeps_its_file(tmp_path: Path) -> None:
    """A large result is read in a thread, while which its client may acknowledge it or the server may close."""
    files = ResultFiles(tmp_path)
    place = files.reserve(4)
    files.write(place, b"text")
    with files.held(place):
        files.remove(place)
        assert files.read(place) == b"text"
    assert files.size_bytes == 0
    place = files.reserve(4)
    files.write(place, b"more")
    with files.held(place):
        files.close()
        assert files.read(place) == b"more"
    assert files.size_bytes == 0


def test_results_are_read_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    read = ResultFiles.read

    def note(self: ResultFiles, place: ResultPlace) -> bytes:
        readers.append(threading.current_thread())
        return read(self, place)

    monkeypatch.setattr(ResultFiles, "read", note)

    async def main() -> None:
        files = ResultFiles(tmp_path)
        futures = Futures(1.0, 3600.0, UnfinishedSamples(tmp_path / "samples"), files=files, memory_bytes=0)
        [request_id] = resolved(futures, 1)
        await until(lambda: futures.memory_bytes == 0)
        assert await futures.wait(request_id) == FutureResult(body=b"0 " + BODY, media="m")
        futures.close()

    asyncio.run(main())
    assert readers
    assert threading.main_thread() not in readers
