"""Training and sampling share a device by time."""

import asyncio
import time

from tinsmith.engine.turns import Party, Turns


def _spend(turns: Turns, log: list[Party], party: Party, seconds: float, count: int) -> asyncio.Task[None]:
    async def work() -> None:
        for _ in range(count):
            async with turns.of(party):
                time.sleep(seconds)  # noqa: ASYNC251 - computing blocks the loop, as an engine does
                log.append(party)

    return asyncio.create_task(work())


def test_a_long_turn_is_followed_by_as_much_time_in_short_ones() -> None:
    log: list[Party] = []

    async def run() -> None:
        turns = Turns()
        await asyncio.gather(
            _spend(turns, log, "training", 0.02, 3),
            _spend(turns, log, "sampling", 0.002, 40),
        )

    asyncio.run(run())
    first, second = [place for place, party in enumerate(log) if party == "training"][-2:]
    assert 4 <= second - first - 1 <= 12


def test_who_is_alone_never_waits() -> None:
    log: list[Party] = []

    async def run() -> float:
        turns = Turns()
        start = time.perf_counter()
        await _spend(turns, log, "sampling", 0.0, 1000)
        return time.perf_counter() - start

    assert asyncio.run(run()) < 1.0
    assert len(log) == 1000


def test_who_was_idle_does_not_make_the_other_starve() -> None:
    log: list[Party] = []

    async def run() -> None:
        turns = Turns()
        turns._used["training"] = 1000.0  # an hour of training alone
        await asyncio.gather(
            _spend(turns, log, "training", 0.05, 2),
            _spend(turns, log, "sampling", 0.05, 60),
        )

    asyncio.run(run())
    assert log.index("training") < 50
