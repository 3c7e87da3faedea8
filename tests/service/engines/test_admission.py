"""Admission of samples: never more than the engine can run, tenants in turn, no request starves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.sampling.capacity import cache_reserve
from tinsmith.service.engines.admission import AdmissionQueue

CACHE = 8 * 64
"""Of eight small requests, and a ninth at hand."""


def request(prompt: int = 5, answers: int = 1, max_tokens: int | None = 10) -> SampleRequest:
    return SampleRequest(request_id="", prompt=np.ones(prompt, np.int32), num_samples=answers, max_tokens=max_tokens)


class Load:
    """Requests in an admission queue, and an engine that runs the admitted ones until `end`."""

    def __init__(self, cache_tokens: int = CACHE) -> None:
        self.admission_queue = AdmissionQueue(cache_tokens)
        self.order: list[str] = []
        self.inside: list[tuple[str, int, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, name: str, one: SampleRequest) -> asyncio.Task[None]:
        task = asyncio.create_task(self._go(name, one))
        self.tasks.append(task)
        return task

    async def _go(self, name: str, one: SampleRequest) -> None:
        async with self.admission_queue.admit(name[0], one):
            self.order.append(name)
            mine = (name, cache_reserve(one), asyncio.Event())
            self.inside.append(mine)
            try:
                await mine[2].wait()
            finally:
                self.inside.remove(mine)

    async def settle(self) -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return [name for name, _, _ in self.inside]

    async def end(self, name: str) -> list[str]:
        next(event for held, _, event in self.inside if held == name).set()
        return await self.settle()


def test_a_thousand_of_one_tenant_delay_the_single_one_of_another_by_no_more_than_a_turn() -> None:
    async def main() -> None:
        load = Load()
        for number in range(1000):
            load.come(f"a{number}", request())
        assert await load.settle() == [f"a{number}" for number in range(9)], "no more than the engine can run"
        assert load.admission_queue.waiting() == {"a": 991}
        for name in ("b0", "b1", "c0"):
            load.come(name, request())
        for number in range(6):
            await load.end(f"a{number}")
        assert load.order[9:] == ["a9", "b0", "c0", "a10", "b1", "a11"]
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)
        assert load.admission_queue.waiting() == {}

    asyncio.run(main())


def test_a_large_request_gets_its_turn_and_what_fits_nowhere_runs_alone() -> None:
    async def main() -> None:
        load = Load()
        for number in range(20):
            load.come(f"a{number}", request())
        load.come("b0", request())
        large = load.come("b1", request(answers=100))
        await load.settle()
        while "b1" not in load.order:
            await load.end(load.inside[0][0])
        assert load.order.index("b1") < 20, "not overtaken by all who are smaller"
        assert [name for name, _, _ in load.inside] == ["b1"], "it waited for room"
        large.cancel()
        assert len(await load.settle()) == 9
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)

    asyncio.run(main())


def test_giving_up_while_waiting_leaves_no_trace() -> None:
    async def main() -> None:
        load = Load()
        tasks = [load.come(f"a{number}", request()) for number in range(12)]
        await load.settle()
        for task in tasks[9:]:
            task.cancel()
        await load.settle()
        assert load.admission_queue.waiting() == {}
        tasks[0].cancel()
        late = load.come("a99", request())
        assert "a99" in await load.settle()
        for task in (*tasks, late):
            task.cancel()
        await asyncio.gather(*tasks, late, return_exceptions=True)
        assert Load().admission_queue.waiting() == load.admission_queue.waiting() == {}

    asyncio.run(main())


COMING = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 200), st.integers(1, 6), st.integers(0, 9)),
    min_size=1,
    max_size=40,
)


@given(COMING)
@settings(deadline=None, max_examples=60)
def test_everyone_runs_once_within_the_room_and_in_their_tenants_order(
    coming: Sequence[tuple[str, int, int, int]],
) -> None:
    async def main() -> None:
        load = Load()
        for number, (owner, prompt, answers, ends) in enumerate(coming):
            load.come(f"{owner}{number}", request(prompt, answers))
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
            mine = [int(name[1:]) for name in load.order if name[0] == owner]
            assert mine == sorted(mine)

    asyncio.run(main())


def check(load: Load) -> None:
    assert sum(room for _, room, _ in load.inside) <= CACHE + CACHE // 8 or len(load.inside) == 1
    assert load.inside or not load.admission_queue.waiting(), "nobody waits for an idle engine"
