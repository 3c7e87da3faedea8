"""Logs of what ended: a cursor for each sampling session and clone."""

from __future__ import annotations

import asyncio
import time

import pytest

from tinsmith.errors import BadRequest
from tinsmith.service.results.completion_log import Completion, CompletionLog, Target, target_of

MINE = Target("s:sample:0", 0)


def ended(number: int, size: int | None = 7) -> Completion:
    return Completion(request_id=f"s:sample:0:{number}", size=size)


def test_a_log_gives_what_comes_after_the_cursor_and_drops_what_came_before() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda known: None)
        assert await logs.wait_after(MINE, 0, 0) == ([], 0)
        logs.add(ended(1))
        logs.add(ended(2, None))
        logs.add(Completion(request_id="s:sample:1:1", size=1))
        first, cursor = await logs.wait_after(MINE, 0, 0)
        assert first == [ended(1), ended(2, None)]
        assert (await logs.wait_after(MINE, 0, 0))[0] == first  # the response was lost: asked again
        logs.add(ended(3))
        assert (await logs.wait_after(MINE, cursor, 0))[0] == [ended(3)]
        assert (await logs.wait_after(MINE, 0, 0))[0] == [ended(3)]

    asyncio.run(main())


def test_clones_have_logs_of_their_own() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda known: None)
        logs.add(ended(5))
        logs.add(ended(3 * 10**9 + 5))
        logs.add(ended(999_999_999 * 10**9))
        for clone, number in ((0, 5), (3, 3 * 10**9 + 5), (999_999_999, 999_999_999 * 10**9)):
            assert (await logs.wait_after(Target("s:sample:0", clone), 0, 0))[0] == [ended(number)]

    asyncio.run(main())


def test_a_poll_wakes_when_something_ends_or_everything_does() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda known: None)
        polls = [asyncio.create_task(logs.wait_after(MINE, 0, 30)) for _ in range(2)]
        await asyncio.sleep(0)
        logs.add(ended(1))
        assert [(await poll)[0] for poll in polls] == [[ended(1)]] * 2
        poll = asyncio.create_task(logs.wait_after(Target("other", 0), 12, 30))
        await asyncio.sleep(0)
        logs.wake_waiters()
        assert await poll == ([], 12)
        began = time.monotonic()
        assert await CompletionLog(lambda known: None).wait_after(MINE, 0, 0.05) == ([], 0)
        assert time.monotonic() - began >= 0.05

    asyncio.run(main())


def test_the_next_process_goes_on_from_a_larger_cursor() -> None:
    async def main() -> None:
        old = CompletionLog(lambda known: None)
        for number in range(3):
            old.add(ended(number))
        _, cursor = await old.wait_after(MINE, 0, 0)
        await asyncio.sleep(0.001)
        new = CompletionLog(lambda known: None)
        new.add(ended(9))
        assert (await new.wait_after(MINE, cursor, 0))[0] == [ended(9)]
        assert (await new.wait_after(MINE, cursor + 10**15, 0))[0] == [ended(9)]  # a clock that went back

    asyncio.run(main())


def test_fetched_or_repeated_ends_are_listed_once() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda known: None)
        for one in (ended(1), ended(2), ended(1, None)):
            logs.add(one)
        assert (await logs.wait_after(MINE, 0, 0))[0] == [ended(2), ended(1, None)]
        logs.acknowledge([ended(2).request_id])
        assert (await logs.wait_after(MINE, 0, 0))[0] == [ended(1, None)]

    asyncio.run(main())


def test_only_samples_have_a_log() -> None:
    assert target_of("s:sample:4:2000000007") == Target("s:sample:4", 2)
    with pytest.raises(BadRequest):
        target_of("nothing")


def test_on_seen_gets_acknowledged_requests() -> None:
    async def main() -> None:
        known: list[str] = []
        logs = CompletionLog(known.extend)
        for number in range(4):
            logs.add(ended(number))
        _, cursor = await logs.wait_after(MINE, 0, 0)
        assert known == []
        logs.add(ended(9))
        await logs.wait_after(MINE, cursor, 0)
        logs.acknowledge([ended(9).request_id])
        assert known == [ended(number).request_id for number in (0, 1, 2, 3, 9)]

    asyncio.run(main())
