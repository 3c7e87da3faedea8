"""Time slicing of a device between training and sampling, with a simulated clock."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine import device_sharing
from tinsmith.engine.device_sharing import POLICIES, DeviceScheduler, MemoryTurns, Sharing, Workload
from tinsmith.errors import EngineDied


@dataclass
class Simulation:
    """A device whose clock only moves while a workload computes."""

    sharing: Sharing
    now: float = 0.0
    turns: list[tuple[Workload, float, float]] = field(default_factory=list)
    """(workload, start, end) of each turn."""

    def __post_init__(self) -> None:
        self.scheduler = DeviceScheduler(POLICIES[self.sharing], clock=lambda: self.now)

    async def work(self, workload: Workload, durations: Sequence[float]) -> None:
        for duration in durations:
            async with self.scheduler.turn(workload):
                self.turns.append((workload, self.now, self.now + duration))
                self.now += duration

    def compete(self, training: Sequence[float], sampling: Sequence[float]) -> None:
        """Run both workloads at once, and keep the turns up to the last one for which both had work."""

        async def run() -> None:
            await asyncio.gather(self.work("training", training), self.work("sampling", sampling))

        asyncio.run(run())
        last = min(max(index for index, turn in enumerate(self.turns) if turn[0] == workload) for workload in WORKLOADS)
        self.turns = self.turns[: last + 1]

    def slices(self) -> Iterator[tuple[Workload, float]]:
        """(workload, seconds) of each time slice."""
        for workload, turns in itertools.groupby(self.turns, key=lambda turn: turn[0]):
            yield workload, sum(end - start for _, start, end in turns)


WORKLOADS: tuple[Workload, ...] = ("training", "sampling")
DURATIONS = st.lists(st.floats(0.001, 5.0), min_size=20, max_size=60)


def test_latency_policy_lets_a_step_wait_for_one_micro_batch() -> None:
    simulation = Simulation("latency")
    simulation.compete([0.5] * 20, [0.05] * 600)
    slices = list(simulation.slices())[1:-1]
    assert {round(length, 6) for workload, length in slices if workload == "training"} == {0.5}
    assert all(1.5 <= length < 1.6 for workload, length in slices if workload == "sampling")


def test_throughput_policy_gives_both_equal_slices() -> None:
    simulation = Simulation("throughput")
    simulation.compete([0.3] * 60, [0.05] * 400)
    slices = list(simulation.slices())[1:-1]
    assert {round(length, 6) for workload, length in slices if workload == "training"} == {2.1}
    assert all(2.1 <= round(length, 6) < 2.2 for workload, length in slices if workload == "sampling")


@pytest.mark.parametrize("sharing", POLICIES)
@given(training=DURATIONS, sampling=DURATIONS)
@settings(max_examples=60, deadline=None)
def test_no_workload_starves(sharing: Sharing, training: list[float], sampling: list[float]) -> None:
    """Lower bounds on each workload's time over any window of slices, for turns of any lengths.

    Training gets its share except for the last step of each sampling slice, which may be long; sampling gets its share
    except for its unfinished last slice.
    """
    simulation, policy = Simulation(sharing), POLICIES[sharing]
    simulation.compete(training, sampling)
    slices = list(simulation.slices())
    for (workload, length), (_, following) in itertools.pairwise(slices[1:-1]):
        if workload == "training":
            assert length < policy.training_slice_s + max(training) + 1e-9  # the longest wait of sampling
            assert following > policy.sampling_ratio * length - 1e-9  # the share of sampling after it
        else:
            assert following >= policy.training_slice_s - 1e-9
    for workload in WORKLOADS:
        share = policy.sampling_ratio if workload == "sampling" else 1.0
        for first, last in itertools.combinations(range(1, len(slices) - 1), 2):
            window = slices[first : last + 1]
            used = sum(length for name, length in window if name == workload)
            ends = 2 * (policy.sampling_ratio + 1) * (policy.training_slice_s + max(*training, *sampling))
            overshot = max(sampling) * len(window) if workload == "training" else 0.0
            total = sum(length for _, length in window)
            assert used >= share / (policy.sampling_ratio + 1) * (total - overshot - ends)


@pytest.mark.parametrize("sharing", POLICIES)
def test_single_workload_never_waits(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, sleeps = Simulation(sharing), list[float]()

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    monkeypatch.setattr(device_sharing, "asyncio", SimpleNamespace(sleep=sleep))
    asyncio.run(simulation.work("sampling", [1.0] * 1000))
    assert sleeps == [0] * 1000 * device_sharing.LOOP_ITERATIONS
    assert len(simulation.turns) == 1000


@pytest.mark.parametrize("sharing", POLICIES)
@pytest.mark.parametrize("early", WORKLOADS)
def test_late_workload_gets_the_next_turn_and_no_longer_slice(sharing: Sharing, early: Workload) -> None:
    simulation = Simulation(sharing)
    late: Workload = "sampling" if early == "training" else "training"

    async def run() -> None:
        await simulation.work(early, [1.0] * 100)  # runs alone for a long time
        simulation.turns.clear()
        await asyncio.gather(simulation.work(early, [0.1] * 200), simulation.work(late, [0.1] * 200))

    asyncio.run(run())
    workloads = [workload for workload, _, _ in simulation.turns]
    assert late in workloads[:2]
    [first] = itertools.islice((length for workload, length in simulation.slices() if workload == late), 1)
    policy = POLICIES[sharing]
    assert first <= (policy.training_slice_s + 1.0) * policy.sampling_ratio + 0.1


@pytest.mark.parametrize("sharing", POLICIES)
def test_message_during_a_turn_is_handled_before_the_next(sharing: Sharing) -> None:
    """A thread passes the message to the event loop; it becomes a task, and that creates one that waits for a turn."""
    simulation = Simulation(sharing)
    tasks: list[asyncio.Task[None]] = []

    async def answer() -> None:
        tasks.append(asyncio.create_task(simulation.work("sampling", [0.01])))

    async def run() -> None:
        for number in range(200):
            async with simulation.scheduler.turn("training"):
                simulation.now += 3.0
                simulation.turns.append(("training", simulation.now - 3.0, simulation.now))
                if number == 100:
                    asyncio.get_running_loop().call_soon_threadsafe(lambda: tasks.append(asyncio.create_task(answer())))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [workload for workload, _, _ in simulation.turns].index("sampling") == 101


def test_config_accepts_every_policy_name() -> None:
    from tinsmith.engine.config import EngineConfig

    assert {EngineConfig(sharing=name).sharing for name in POLICIES} == set(POLICIES)


class TwoProcesses:
    """Two processes that have the device in turns; a handover takes two seconds of a clock that only work moves."""

    HANDOVER_S = 2.0

    def __init__(self, sharing: Sharing = "throughput") -> None:
        self.now = 0.0
        self.holder: Workload = "training"
        self.done: list[tuple[Workload, float]] = []
        """(workload, seconds) of each turn."""
        self.turns = MemoryTurns(self._hand_over, POLICIES[sharing], clock=lambda: self.now)

    async def _hand_over(self, workload: Workload) -> None:
        assert workload != self.holder
        self.holder, self.now = workload, self.now + self.HANDOVER_S

    async def work(self, workload: Workload, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            async with self.turns.turn(workload):
                assert self.holder == workload
                await asyncio.sleep(0)
                assert self.holder == workload
                self.now += seconds
                self.done.append((workload, seconds))

    async def compete(self, counts: Sequence[int]) -> None:
        """Two tasks of each workload, so that one always waits, then close."""
        tasks = [self.work(workload, count) for workload, count in zip(WORKLOADS, counts, strict=True)]
        more = [self.work(workload, count) for workload, count in zip(WORKLOADS, counts, strict=True)]
        await asyncio.gather(*tasks, *more)
        await self.turns.close()


@pytest.mark.parametrize("sharing", POLICIES)
def test_slices_of_processes_are_as_long_as_handovers_cost(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    """To break it: leave out `self._slice_s = ...` in `MemoryTurns._switch`."""
    monkeypatch.setattr(device_sharing, "IDLE_S", 0.0)
    pair = TwoProcesses(sharing)
    asyncio.run(pair.compete((120, 120)))
    assert len(pair.done) == 480
    slices = [sum(each[1] for each in turns) for _, turns in itertools.groupby(pair.done, key=lambda turn: turn[0])]
    wanted = POLICIES[sharing].handovers * pair.HANDOVER_S
    assert len(slices) > 3
    assert all(wanted <= length <= wanted + 2 for length in slices[1:-2])


@given(counts=st.tuples(st.integers(0, 30), st.integers(0, 30)), sharing=st.sampled_from(list(POLICIES)))
@settings(max_examples=40, deadline=None)
def test_no_process_starves(counts: tuple[int, int], sharing: Sharing) -> None:
    """A process that is done gives the device away, whatever is left of its slice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sharing, "IDLE_S", 0.0)
        pair = TwoProcesses(sharing)
        asyncio.run(asyncio.wait_for(pair.compete(counts), 60))
    assert len(pair.done) == 2 * sum(counts)


def test_pausable_turn_gives_the_device_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gets it back, as long as it runs. To break it: count pausable turns in `_unbroken`."""
    monkeypatch.setattr(device_sharing, "IDLE_S", 0.0)

    async def main() -> None:
        pair = TwoProcesses()
        async with pair.turns.turn("sampling", pausable=True):
            assert pair.holder == "sampling"
            pair.now += 1000
            await pair.work("training", 1)
            assert pair.holder == "training"
            while pair.holder == "training":  # noqa: ASYNC110 - nothing else runs
                await asyncio.sleep(0)
        await pair.turns.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_turns_fail_once_closed() -> None:
    async def main() -> None:
        pair = TwoProcesses()
        async with pair.turns.turn("training"):
            waiting = asyncio.create_task(pair.work("sampling", 1))
            await asyncio.sleep(0)
            await pair.turns.close()
        for _ in range(2):
            with pytest.raises(EngineDied, match="closed"):
                await waiting
            waiting = asyncio.create_task(pair.work("training", 1))

    asyncio.run(asyncio.wait_for(main(), 60))
