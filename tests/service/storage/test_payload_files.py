"""Large payloads in files: read back, removed when they are not needed, never referred to before they are durable."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event

from tests.service.storage.test_store import MODEL
from tests.service.support.databases import opened
from tests.service.support.inprocess import pass_body
from tinsmith.service.storage import payload_files
from tinsmith.service.storage.payload_files import INLINE_BYTES, held
from tinsmith.service.storage.payloads import decode_operation, queued_request
from tinsmith.service.storage.records import FutureResult, QueuedRequest
from tinsmith.service.storage.store import FinishedRequest, Store

pytestmark = pytest.mark.only_on("sqlite")
DONE = FutureResult(body=b"x")


def payload(seq: int, tokens: int = 5000, **options) -> bytes:
    """A forward_backward body, which is larger than a row holds with this many tokens."""
    body = pass_body(MODEL.id, seq, range(seq, seq + tokens), **options)
    assert (len(body) > INLINE_BYTES) is (tokens >= 5000)
    return body


def request(seq: int, body: bytes) -> QueuedRequest:
    return queued_request(
        f"{MODEL.id}:{seq}", "o", MODEL.id, seq, seq, decode_operation("forward_backward", MODEL.id, body)
    )


def segments(data: Path) -> list[Path]:
    return sorted((data / "payloads").glob("*.payloads"))


async def accept(store: Store, *seqs: int, **options) -> dict[int, QueuedRequest]:
    """Accept requests with large payloads at once."""
    bodies = {seq: payload(seq, **options) for seq in seqs}
    requests = {seq: request(seq, body) for seq, body in bodies.items()}
    assert all(await asyncio.gather(*(store.accept(requests[seq], bodies[seq]) for seq in seqs)))
    return requests


@pytest.fixture
def one_payload_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every payload has a segment of its own."""
    monkeypatch.setattr(payload_files, "SEGMENT_BYTES", 1)


def test_payloads_are_read_back(tmp_path: Path) -> None:
    """Those of waiting requests at a start, those of finished ones by a replay; small ones stay in their rows."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            requests = await accept(store, 1, 2, 3)
            small = payload(4, tokens=20)
            await store.accept(request(4, small), small)
            await store.finish([FinishedRequest(request=requests[seq], result=DONE) for seq in (1, 2)])
        [segment] = segments(tmp_path)
        assert segment.read_bytes() == payload(1) + payload(2) + payload(3)
        assert payload(1)[-500:] not in (tmp_path / "tinsmith.db").read_bytes()
        async with opened(tmp_path) as store:
            assert [each.payload for each in await store.requests_to_replay(MODEL)] == [payload(1), payload(2)]
            waiting = await store.pending_requests()
            assert [len(each.operation.data[0].tokens) for each in waiting] == [4999, 19]  # type: ignore[union-attr]
            np.testing.assert_array_equal(waiting[0].operation.data[0].tokens, range(3, 5002))  # type: ignore[union-attr]
            await accept(store, 5)
            assert len(segments(tmp_path)) == 2, "a torn end of the first would come before it"

    asyncio.run(main())


def test_covered_payloads_are_removed(tmp_path: Path, one_payload_each: None) -> None:
    """Break `cover`: leave the rows of `payloads`."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            requests = await accept(store, 1, 2, 3, 4)
            await store.finish([FinishedRequest(request=requests[seq], result=DONE) for seq in (1, 2, 3)])
            assert len(segments(tmp_path)) == 4
            await store.cover(replace(MODEL, covered=2))
            assert len(segments(tmp_path)) == 2
            assert [each.seq for each in await store.requests_to_replay(replace(MODEL, covered=2))] == [3]
            await store.finish([FinishedRequest(request=requests[4], result=DONE)])
            await store.cover(replace(MODEL, covered=2**62, state="ended"))
            assert len(segments(tmp_path)) == 1, "the open one, which is removed at the next start"
        async with opened(tmp_path):
            assert segments(tmp_path) == []

    asyncio.run(main())


@pytest.mark.parametrize("result", [DONE, replace(DONE, failed=True)])
def test_payload_that_no_replay_needs_ends_with_its_request(
    tmp_path: Path, one_payload_each: None, result: FutureResult
) -> None:
    """A model that only runs `forward` is never captured. Break `_is_replayed`: True for all."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            options = {} if result.failed else {"forward_only": True}
            requests = await accept(store, 1, 2, **options)
            await store.finish([FinishedRequest(request=each, result=result) for each in requests.values()])
            assert len(segments(tmp_path)) == 1
            assert await store.requests_to_replay(MODEL) == []

    asyncio.run(main())


def test_garbage_of_a_crash_is_removed(tmp_path: Path) -> None:
    """A segment without rows goes at the start; a torn end stays unread."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            await accept(store, 1)
        [segment] = segments(tmp_path)
        with segment.open("ab") as torn:
            torn.write(payload(2)[:1000])
        orphan = segment.with_name("00000007.payloads")
        orphan.write_bytes(payload(3))
        async with opened(tmp_path) as store:
            assert segments(tmp_path) == [segment]
            assert [len(each.operation.data[0].tokens) for each in await store.pending_requests()] == [4999]  # type: ignore[union-attr]

    asyncio.run(main())


def test_payload_is_durable_before_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync for all payloads of a group, and first those of both folders' names. Break `_execute_in_parts`: sync
    after the block; or `_make`: leave out the sync."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            order: list[str] = []
            fsync = os.fsync

            def record(descriptor: int) -> None:
                order.append("file" if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".payloads") else "folder")
                fsync(descriptor)

            monkeypatch.setattr(os, "fsync", record)
            event.listen(store._sync_engine, "commit", lambda db: order.append("commit"))
            await store.put(MODEL)
            await accept(store, *range(1, 9))
            await accept(store, *range(9, 12))
            assert order == ["commit", "folder", "folder", "file", "commit", "file", "commit"]

    asyncio.run(main())


def test_full_disk_delays_a_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            pwrite, failures = os.pwrite, iter([True, False])

            def full(descriptor: int, content: bytes, offset: int) -> int:
                if next(failures, False):
                    pwrite(descriptor, bytes(content)[:100], offset)
                    raise OSError(28, "No space left on device")
                return pwrite(descriptor, content, offset)

            monkeypatch.setattr(os, "pwrite", full)
            await accept(store, 1)
            [segment] = segments(tmp_path)
            assert segment.read_bytes() == payload(1)

    asyncio.run(main())


def test_held_segments_stay(tmp_path: Path, one_payload_each: None) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            requests = await accept(store, 1, 2, 3)
            await store.finish([FinishedRequest(request=each, result=DONE) for each in requests.values()])
            with held(tmp_path / "payloads") as files:
                await store.cover(replace(MODEL, covered=3))
                assert segments(tmp_path) == files
                assert len(files) == 3
            await accept(store, 4)
            await store.cover(replace(MODEL, covered=3))
            assert len(segments(tmp_path)) == 1

    asyncio.run(main())
