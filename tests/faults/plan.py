"""A seeded plan of faults. The same seed and count give the same list, so that a violation can be repeated.

A fault says what is done, how long it lasts, and how long the service runs before it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

KILLS = ("kill_api", "kill_engine", "kill_both")
PROCESS_KILLS = ("kill_process", "stall_process")
"""Deaths of one process of an engine that consists of several (tests/cluster); one that is stalled is killed by the
watchdog."""
MACHINE_KILLS = ("kill_node_agent", "kill_raylet", "kill_head")
"""Kills of what belongs to a Ray cluster (tests/cluster)."""
STOPS = ("stop_api", "stop_engine", "stall_engine")
"""`stall_engine` stops the engine until the watchdog kills it."""
PART_STOPS = ("stop_process", "stop_node_agent", "stop_raylet")
"""Stops of one of several."""
PARTS = (*PROCESS_KILLS, *MACHINE_KILLS, *PART_STOPS)
"""Faults of a part of the engine. Those that are not early wait until all of it is up again."""
REQUEST_FAULTS = (
    "delay",
    "cut_before",
    "cut_after",
    "truncate_request",
    "truncate_response",
    "duplicate",
    "duplicate_later",
)
"""Faults of the proxy, each for the next requests through it."""
OTHERS = ("cut_all", "disk_full", "clock")
WEIGHTS: Mapping[str, int] = {
    **{"kill_api": 40, "kill_engine": 28, "kill_both": 12, "stop_api": 9, "stop_engine": 9, "stall_engine": 2},
    **dict.fromkeys(REQUEST_FAULTS, 2),
    **{"cut_all": 2, "disk_full": 2, "clock": 2},
}
DURATIONS_S: Mapping[str, tuple[float, float]] = {
    "stop_api": (0.05, 1.5),
    **dict.fromkeys(("stop_engine", *PART_STOPS), (0.05, 1.5)),
    "delay": (0.05, 0.5),
    "duplicate_later": (0.1, 1.5),
    "disk_full": (0.2, 1.0),
}
EARLY = 0.1
"""Share of kills during a start of the service."""
CLOCK_S = (-1500.0, 1500.0)
"""Offset of the wall clock: less than any lifetime that the service promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a plan."""

    kind: str
    after_s: float
    """Time between the end of the previous fault, when the service is ready again, and this one."""
    lasts_s: float = 0.0
    requests: int = 0
    """Requests that a fault of the proxy is for."""
    early: bool = False
    """Of a kill: it does not wait until the service is ready again after the previous fault."""
    offset_s: float = 0.0
    """Of `clock`: the wall clock's offset from now on."""
    choice: float = 0.0
    """Which of several processes or machines, as a share of their number."""

    def __str__(self) -> str:
        extras = [f"for {self.lasts_s:.2f} s"] * bool(self.lasts_s) + [f"of {self.requests}"] * bool(self.requests)
        extras += ["before the service is ready"] * self.early
        extras += [f"to {self.offset_s:+.0f} s"] * (self.kind == "clock")
        return " ".join([f"after {self.after_s:.2f} s", self.kind, *extras])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The faults of one run."""

    seed: int
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int, count: int, weights: Mapping[str, int] = WEIGHTS, longest_s: float = 0.8) -> Plan:
        """Draw `count` faults; every kind with a weight comes at least once if there is room."""
        rng = random.Random(seed)
        kinds = list(weights)[:count]
        kinds += rng.choices(list(weights), list(weights.values()), k=count - len(kinds))
        rng.shuffle(kinds)
        return cls(seed=seed, faults=tuple(_draw(rng, kind, longest_s) for kind in kinds))

    def count(self, kinds: tuple[str, ...]) -> int:
        """Number of faults of these kinds; a kill of both processes counts once."""
        tally = Counter(fault.kind for fault in self.faults)
        return sum(tally[kind] for kind in kinds)

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *map(str, self.faults)])


def _draw(rng: random.Random, kind: str, longest_s: float) -> Fault:
    # Most faults come soon after the last one, when recovery and repeated requests are under way.
    after_s = longest_s * rng.random() ** 2
    lasts_s = rng.uniform(*DURATIONS_S.get(kind, (0.0, 0.0)))
    requests = rng.randint(1, 6) if kind in REQUEST_FAULTS else 0
    offset_s = rng.uniform(*CLOCK_S) if kind == "clock" else 0.0
    early = kind in (*KILLS, *PARTS) and rng.random() < EARLY
    return Fault(
        kind=kind,
        after_s=after_s,
        lasts_s=lasts_s,
        requests=requests,
        early=early,
        offset_s=offset_s,
        choice=rng.random() if kind in PARTS else 0.0,
    )
