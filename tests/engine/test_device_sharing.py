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
from tinsmith.engine.device_sharing import POLICIES, DeviceScheduler, Sharing, Workload


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
