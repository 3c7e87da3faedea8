"""Training and sampling share a device by time; the time here is made by hand."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.device_sharing import POLICIES, Party, Sharing, Turns


@dataclass
class Bench:
    """A device whose clock only moves while someone computes."""

    sharing: Sharing
    now: float = 0.0
    log: list[tuple[Party, float, float]] = field(default_factory=list)
    """Whose turn, from when to when."""

    def __post_init__(self) -> None:
        self.turns = Turns(POLICIES[self.sharing], clock=lambda: self.now)

    async def work(self, party: Party, seconds: Sequence[float]) -> None:
        for one in seconds:
            async with self.turns.of(party):
                self.log.append((party, self.now, self.now + one))
                self.now += one

    def together(self, training: Sequence[float], sampling: Sequence[float]) -> None:
        """Both always want the device until one of them has nothing left; what was done while both did is kept."""

        async def run() -> None:
            await asyncio.gather(self.work("training", training), self.work("sampling", sampling))

        asyncio.run(run())
        left = min(max(place for place, one in enumerate(self.log) if one[0] == party) for party in PARTIES)
        self.log = self.log[: left + 1]

    def spells(self) -> Iterator[tuple[Party, float]]:
        """Who had the device, and for how long, spell by spell."""
        for party, turns in itertools.groupby(self.log, key=lambda one: one[0]):
            yield party, sum(end - start for _, start, end in turns)


PARTIES: tuple[Party, ...] = ("training", "sampling")
LENGTHS = st.lists(st.floats(0.001, 5.0), min_size=20, max_size=60)


def test_under_latency_a_step_waits_for_one_micro_batch() -> None:
    bench = Bench("latency")
    bench.together([0.5] * 20, [0.05] * 600)
    spells = list(bench.spells())[1:-1]
    assert {round(length, 6) for party, length in spells if party == "training"} == {0.5}
    assert all(1.5 <= length < 1.6 for party, length in spells if party == "sampling")


def test_under_throughput_each_has_a_stretch() -> None:
    bench = Bench("throughput")
    bench.together([0.3] * 60, [0.05] * 400)
    spells = list(bench.spells())[1:-1]
    assert {round(length, 6) for party, length in spells if party == "training"} == {2.1}
    assert all(2.1 <= round(length, 6) < 2.2 for party, length in spells if party == "sampling")


@pytest.mark.parametrize("sharing", POLICIES)
@given(training=LENGTHS, sampling=LENGTHS)
@settings(max_examples=60, deadline=None)
def test_whatever_the_turns_nobody_starves(sharing: Sharing, training: list[float], sampling: list[float]) -> None:
    """Floors over any stretch of spells, for turns of any lengths.

    Training has its share of the time but for the last step of each of sampling's spells, which may be long; sampling
    has its share but for the last of its spells that is under way.
    """
    bench, policy = Bench(sharing), POLICIES[sharing]
    bench.together(training, sampling)
    spells = list(bench.spells())
    for (party, length), (_, after) in itertools.pairwise(spells[1:-1]):
        if party == "training":
            assert length < policy.stretch + max(training) + 1e-9  # sampling waits no longer
            assert after > policy.weight * length - 1e-9  # and then has its share
        else:
            assert after >= policy.stretch - 1e-9
    for party in PARTIES:
        share = policy.weight if party == "sampling" else 1.0
        for first, last in itertools.combinations(range(1, len(spells) - 1), 2):
            window = spells[first : last + 1]
            mine = sum(length for who, length in window if who == party)
            ends = 2 * (policy.weight + 1) * (policy.stretch + max(*training, *sampling))
            overshot = max(sampling) * len(window) if party == "training" else 0.0
            total = sum(length for _, length in window)
            assert mine >= share / (policy.weight + 1) * (total - overshot - ends)


@pytest.mark.parametrize("sharing", POLICIES)
def test_who_is_alone_never_waits(sharing: Sharing) -> None:
    bench = Bench(sharing)
    start = time.perf_counter()
    asyncio.run(bench.work("sampling", [1.0] * 1000))
    assert time.perf_counter() - start < 2.0
    assert len(bench.log) == 1000


@pytest.mark.parametrize("sharing", POLICIES)
@pytest.mark.parametrize("alone", PARTIES)
def test_who_comes_late_has_the_device_at_once_and_no_longer_than_ever(sharing: Sharing, alone: Party) -> None:
    bench = Bench(sharing)
    late: Party = "sampling" if alone == "training" else "training"

    async def run() -> None:
        await bench.work(alone, [1.0] * 100)  # a long time alone
        bench.log.clear()
        await asyncio.gather(bench.work(alone, [0.1] * 200), bench.work(late, [0.1] * 200))

    asyncio.run(run())
    parties = [party for party, _, _ in bench.log]
    assert late in parties[:2]
    [first] = itertools.islice((length for party, length in bench.spells() if party == late), 1)
    policy = POLICIES[sharing]
    assert first <= (policy.stretch + 1.0) * policy.weight + 0.1


@pytest.mark.parametrize("sharing", POLICIES)
def test_a_message_that_comes_while_one_computes_is_heard_before_the_next_turn(sharing: Sharing) -> None:
    """A thread hands it to the event loop; it becomes a task, which makes another, which asks for a turn."""
    bench = Bench(sharing)
    tasks: list[asyncio.Task[None]] = []

    async def answer() -> None:
        tasks.append(asyncio.create_task(bench.work("sampling", [0.01])))

    async def run() -> None:
        for number in range(200):
            async with bench.turns.of("training"):
                bench.now += 3.0
                bench.log.append(("training", bench.now - 3.0, bench.now))
                if number == 100:
                    asyncio.get_running_loop().call_soon_threadsafe(lambda: tasks.append(asyncio.create_task(answer())))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [party for party, _, _ in bench.log].index("sampling") == 101


def test_names_that_a_configuration_gives_are_policies() -> None:
    from tinsmith.engine.config import EngineConfig

    assert {EngineConfig(sharing=name).sharing for name in POLICIES} == set(POLICIES)
