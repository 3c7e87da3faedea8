"""CompletionLog: finished samples of each sampling session and clone, read by cursor."""

from __future__ import annotations

import asyncio
import time

import pytest

from tinsmith.errors import BadRequest
from tinsmith.service.results.completion_log import Completion, CompletionLog, Target, target_of

TARGET = Target("s:sample:0", 0)


def completion_of(number: int, size: int | None = 7) -> Completion:
    return Completion(request_id=f"s:sample:0:{number}", size=size)


def test_log_lists_entries_after_the_cursor_and_drops_others() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda acknowledged: None)
        assert await logs.wait_after(TARGET, 0, 0) == ([], 0)
        logs.add(completion_of(1))
        logs.add(completion_of(2, None))
        logs.add(Completion(request_id="s:sample:1:1", size=1))
        first, cursor = await logs.wait_after(TARGET, 0, 0)
        assert first == [completion_of(1), completion_of(2, None)]
        assert (await logs.wait_after(TARGET, 0, 0))[0] == first  # the response was lost, so the client polls again
        logs.add(completion_of(3))
        assert (await logs.wait_after(TARGET, cursor, 0))[0] == [completion_of(3)]
        assert (await logs.wait_after(TARGET, 0, 0))[0] == [completion_of(3)]

    asyncio.run(main())


def test_clones_have_separate_logs() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda acknowledged: None)
        logs.add(completion_of(5))
        logs.add(completion_of(3 * 10**9 + 5))
        logs.add(completion_of(999_999_999 * 10**9))
        for clone, number in ((0, 5), (3, 3 * 10**9 + 5), (999_999_999, 999_999_999 * 10**9)):
            assert (await logs.wait_after(Target("s:sample:0", clone), 0, 0))[0] == [completion_of(number)]

    asyncio.run(main())


def test_poll_wakes_on_a_completion_and_on_close() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda acknowledged: None)
        polls = [asyncio.create_task(logs.wait_after(TARGET, 0, 30)) for _ in range(2)]
        await asyncio.sleep(0)
        logs.add(completion_of(1))
        assert [(await poll)[0] for poll in polls] == [[completion_of(1)]] * 2
        poll = asyncio.create_task(logs.wait_after(Target("other", 0), 12, 30))
        await asyncio.sleep(0)
        logs.wake_waiters()
        assert await poll == ([], 12)
        began = time.monotonic()
        assert await CompletionLog(lambda acknowledged: None).wait_after(TARGET, 0, 0.05) == ([], 0)
        assert time.monotonic() - began >= 0.05

    asyncio.run(main())


def test_next_process_starts_at_a_larger_cursor() -> None:
    async def main() -> None:
        old = CompletionLog(lambda acknowledged: None)
        for number in range(3):
            old.add(completion_of(number))
        _, cursor = await old.wait_after(TARGET, 0, 0)
        await asyncio.sleep(0.001)
        new = CompletionLog(lambda acknowledged: None)
        new.add(completion_of(9))
        assert (await new.wait_after(TARGET, cursor, 0))[0] == [completion_of(9)]
        assert (await new.wait_after(TARGET, cursor + 10**15, 0))[0] == [completion_of(9)]  # the clock went back

    asyncio.run(main())


def test_repeated_completions_are_listed_once() -> None:
    async def main() -> None:
        logs = CompletionLog(lambda acknowledged: None)
        for completion in (completion_of(1), completion_of(2), completion_of(1, None)):
            logs.add(completion)
        assert (await logs.wait_after(TARGET, 0, 0))[0] == [completion_of(2), completion_of(1, None)]
        logs.acknowledge([completion_of(2).request_id])
        assert (await logs.wait_after(TARGET, 0, 0))[0] == [completion_of(1, None)]

    asyncio.run(main())


def test_only_samples_have_a_log() -> None:
    assert target_of("s:sample:4:2000000007") == Target("s:sample:4", 2)
    with pytest.raises(BadRequest):
        target_of("nothing")


def test_on_seen_gets_acknowledged_requests() -> None:
    async def main() -> None:
        acknowledged: list[str] = []
        logs = CompletionLog(acknowledged.extend)
        for number in range(4):
            logs.add(completion_of(number))
        _, cursor = await logs.wait_after(TARGET, 0, 0)
        assert acknowledged == []
        logs.add(completion_of(9))
        await logs.wait_after(TARGET, cursor, 0)
        logs.acknowledge([completion_of(9).request_id])
        assert acknowledged == [completion_of(number).request_id for number in (0, 1, 2, 3, 9)]

    asyncio.run(main())
