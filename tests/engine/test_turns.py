"""Training and sampling share a device by time; the time here is made by hand."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from tinsmith.engine.turns import CREDIT, Party, Turns


@dataclass
class Bench:
    """A device whose clock only moves while someone computes."""

    now: float = 0.0
    log: list[Party] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(clock=lambda: self.now)

    async def work(self, party: Party, seconds: float, count: int) -> None:
        for _ in range(count):
            async with self.turns.of(party):
                self.now += seconds
                self.log.append(party)


def test_a_long_turn_is_followed_by_as_much_time_in_short_ones() -> None:
    bench = Bench()

    async def run() -> None:
        await asyncio.gather(bench.work("training", 1.0, 4), bench.work("sampling", 0.1, 60))

    asyncio.run(run())
    turns = [place for place, party in enumerate(bench.log) if party == "training"]
    assert all(10 <= after - before <= 12 for before, after in itertools.pairwise(turns[1:]))


def test_who_is_alone_never_waits() -> None:
    bench = Bench()
    start = time.perf_counter()
    asyncio.run(bench.work("sampling", 1.0, 1000))
    assert time.perf_counter() - start < 2.0
    assert len(bench.log) == 1000


def test_who_was_idle_comes_back_with_little_credit() -> None:
    bench = Bench()

    async def run() -> None:
        await bench.work("training", 10.0, 100)  # a long time alone
        await asyncio.gather(bench.work("training", 0.1, 1), bench.work("sampling", 0.1, 100))

    asyncio.run(run())
    assert bench.log[100:].index("training") <= CREDIT / 0.1 + 1
