"""AdmissionQueue: capacity, turns of tenants, no starvation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.sampling.capacity import cache_reserve
from tinsmith.service.engines.admission import AdmissionQueue

CACHE = 8 * 64
"""Cache of eight small requests; one eighth more is admitted ahead."""


def request(prompt: int = 5, answers: int = 1, max_tokens: int | None = 10) -> SampleRequest:
    return SampleRequest(request_id="", prompt=np.ones(prompt, np.int32), num_samples=answers, max_tokens=max_tokens)


class Load:
    """An admission queue and a stand-in engine that runs admitted requests until `end(name)`."""

    def __init__(self, cache_tokens: int = CACHE) -> None:
        self.admission_queue = AdmissionQueue(cache_tokens)
        self.order: list[str] = []
        self.inside: list[tuple[str, int, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def submit(self, name: str, request: SampleRequest) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(name, request))
        self.tasks.append(task)
        return task

    async def _run(self, name: str, request: SampleRequest) -> None:
        async with self.admission_queue.admit(name[0], request):
            self.order.append(name)
            entry = (name, cache_reserve(request), asyncio.Event())
            self.inside.append(entry)
            try:
                await entry[2].wait()
            finally:
                self.inside.remove(entry)

    async def settle(self) -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return [name for name, _, _ in self.inside]

    async def end(self, name: str) -> list[str]:
        next(event for running, _, event in self.inside if running == name).set()
        return await self.settle()


def test_single_request_of_another_tenant_waits_one_turn() -> None:
    async def main() -> None:
        load = Load()
        for number in range(1000):
            load.submit(f"a{number}", request())
        assert await load.settle() == [f"a{number}" for number in range(9)], "admitted requests"
        assert load.admission_queue.waiting() == {"a": 991}
        for name in ("b0", "b1", "c0"):
            load.submit(name, request())
        for number in range(6):
            await load.end(f"a{number}")
        assert load.order[9:] == ["a9", "b0", "c0", "a10", "b1", "a11"]
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)
        assert load.admission_queue.waiting() == {}

    asyncio.run(main())


def test_large_request_gets_its_turn_and_runs_alone() -> None:
    async def main() -> None:
        load = Load()
        for number in range(20):
            load.submit(f"a{number}", request())
        load.submit("b0", request())
        large = load.submit("b1", request(answers=100))
        await load.settle()
        while "b1" not in load.order:
            await load.end(load.inside[0][0])
        assert load.order.index("b1") < 20, "overtaken by all smaller requests"
        assert [name for name, _, _ in load.inside] == ["b1"], "an oversized request runs alone"
        large.cancel()
        await load.settle()
        assert len(load.order) == 22, "all others fit"
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)

    asyncio.run(main())


def test_cancelled_waiters_leave_no_state() -> None:
    async def main() -> None:
        load = Load()
        tasks = [load.submit(f"a{number}", request()) for number in range(12)]
        await load.settle()
        for task in tasks[9:]:
            task.cancel()
        await load.settle()
        assert load.admission_queue.waiting() == {}
        tasks[0].cancel()
        late = load.submit("a99", request())
        assert "a99" in await load.settle()
        for task in (*tasks, late):
            task.cancel()
        await asyncio.gather(*tasks, late, return_exceptions=True)
        assert Load().admission_queue.waiting() == load.admission_queue.waiting() == {}

    asyncio.run(main())


def test_small_requests_pass_a_large_one_within_a_bound() -> None:
    """Break it: let `_may_pass` return False, or not count."""

    async def main() -> None:
        load = Load()
        for number in range(6):
            load.submit(f"a{number}", request())
        load.submit("b0", request(answers=8))
        for number in range(9):
            load.submit(f"c{number}", request())
        assert await load.settle() == [*(f"a{number}" for number in range(6)), "c0", "c1"], "a part of the capacity"
        for number in range(6):
            assert "b0" not in await load.end(f"a{number}")
        assert load.order[-1] == "c1", "room is kept for the large request"
        await load.end("c0")
        assert load.order[8] == "b0"
        while load.inside:
            await load.end(load.inside[0][0])
        assert len(load.order) == 16

    asyncio.run(main())


@given(
    st.integers(1, 3000),
    st.integers(1, 5000),
    st.integers(1, 2000),
    st.sampled_from([64 * 32, 2**16, 2**20]),
    st.sampled_from([0, 1500]),
)
@settings(deadline=None)
def test_parts_hold_all_samples_and_a_part_of_the_capacity(
    answers: int, prompt: int, max_tokens: int, cache: int, states: int
) -> None:
    whole = replace(request(prompt, answers, max_tokens), prompt_logprobs=True, topk_prompt_logprobs=2)
    queue = AdmissionQueue(cache)
    queue.state_tokens = states
    parts = queue.parts(whole)
    numbers = [part.first_sample + number for part in parts for number in range(part.num_samples)]
    assert numbers == list(range(answers))
    assert [part.prompt_logprobs for part in parts] == [True] + [False] * (len(parts) - 1)
    assert len({part.request_id for part in parts}) == len(parts)
    for part in parts:
        assert part.num_samples == 1 or cache_reserve(part, states) <= cache // 4
        assert part.num_samples <= 64


COMING = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 200), st.integers(1, 6), st.integers(0, 9)),
    min_size=1,
    max_size=40,
)


@given(COMING)
@settings(deadline=None, max_examples=60)
def test_requests_run_once_within_capacity_in_tenant_order(
    coming: Sequence[tuple[str, int, int, int]],
) -> None:
    async def main() -> None:
        load = Load()
        for number, (owner, prompt, answers, ends) in enumerate(coming):
            load.submit(f"{owner}{number}", request(prompt, answers))
            await load.settle()
            check(load)
            if ends < 5 and load.inside:
                await load.end(load.inside[ends % len(load.inside)][0])
        while load.inside:
            await load.end(load.inside[0][0])
            check(load)
        await asyncio.gather(*load.tasks)
        assert len(load.order) == len(coming)
        for owner in "abc":
            numbers = [int(name[1:]) for name in load.order if name[0] == owner]
            assert numbers == sorted(numbers)

    asyncio.run(main())


def check(load: Load) -> None:
    assert sum(reserve for _, reserve, _ in load.inside) <= CACHE + CACHE // 8 or len(load.inside) == 1
    assert load.inside or not load.admission_queue.waiting(), "a request waits for an idle engine"


def test_room_follows_the_number_of_samplers() -> None:
    async def main() -> None:
        load = Load()
        for number in range(40):
            load.submit(f"a{number}", request())
        assert len(await load.settle()) == 9
        load.admission_queue.resize(3)
        assert len(await load.settle()) == 27
        load.admission_queue.resize(1)
        for _ in range(19):
            await load.end(load.inside[0][0])
        assert len(load.order) == 28, "what runs beyond the room of one ends first"
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)

    asyncio.run(main())
