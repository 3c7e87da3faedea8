"""Training and sampling on one device at the same time: what each loses, and how long a token takes meanwhile.

Sixteen samples run without end beside a GRPO batch that is trained again and again; each is also measured alone. A
token's latency is the time between two that a sequence hears of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from benchmarks.comparison import Line, Setting, percentile
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import grpo, questions
from tinsmith.engine.base import SequenceDelta
from tinsmith.engine.device_sharing import POLICIES

RANK, PROMPTS, SAMPLES, TOKENS = 32, 4, 4, 48


def measure(setting: Setting) -> list[Line]:
    """Throughput relative to each workload alone, and token latency, with both policies."""
    lines = []
    for policy in POLICIES:
        ours = EngineDriver(setting, sharing=policy)
        ours.create("bench", RANK)
        ours.capture("bench", "version")
        lines += _lines(ours, setting, policy)
        ours.close()
    return lines


def _lines(ours: EngineDriver, setting: Setting, policy: str) -> list[Line]:
    alone, together = Tally(), Tally()
    lines: list[Line] = []
    seeds = count(1)
    for _ in range(setting.turns):
        ours.wait(_side_by_side(ours, alone, seeds, trains=False, samples=True))
        ours.wait(_side_by_side(ours, alone, seeds, trains=True, samples=False))
        ours.wait(_side_by_side(ours, together, seeds, trains=True, samples=True))
    subject = f"sampling and training at once, --sharing {policy}:"
    shares = []
    for party in ("sampled", "trained"):
        alone_s, both_s = alone.rates[party], together.rates[party]
        shares.append([shared / alone for shared, alone in zip(both_s, alone_s, strict=True)])
        lines.append(
            Line(
                work=f"{subject} tokens {party} in a second",
                baseline="the one alone",
                unit="x",
                values=shares[-1],
                ours=_per_s(both_s),
                theirs=_per_s(alone_s),
            )
        )
    sums = [sum(parts) for parts in zip(*shares, strict=True)]
    lines.append(Line(work=f"{subject} both shares", baseline="1: nothing is lost", unit="x", values=sums))
    for share in (0.5, 0.95):
        values, before = ([1000 * percentile(gaps, share) for gaps in tally.gaps] for tally in (together, alone))
        lines.append(
            Line(
                work=f"{subject} from one token of a sequence to its next, p{100 * share:.0f}",
                baseline="sampling alone",
                unit="ms",
                values=values,
                ours=f"{percentile(values, 0.5):.0f} ms",
                theirs=f"{percentile(before, 0.5):.0f} ms",
                lower=True,
            )
        )
    return lines


class Tally:
    """One run: tokens/s of each workload, and the seconds between tokens, for each turn."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {"sampled": [], "trained": []}
        self.gaps: list[list[float]] = []


async def _side_by_side(ours: EngineDriver, tally: Tally, seeds: count[int], *, trains: bool, samples: bool) -> None:
    """Run until two batches are trained, or two rounds sampled if nothing is trained."""
    over = asyncio.Event()
    gaps: list[float] = []
    jobs = []
    if samples:
        jobs.append(asyncio.create_task(_sampling(ours, tally, gaps, seeds, over if trains else None)))
    if trains:
        await _training(ours, tally)
        over.set()
    await asyncio.gather(*jobs)
    if samples:
        tally.gaps.append(gaps)


async def _training(ours: EngineDriver, tally: Tally) -> None:
    work = grpo(groups=4)
    start = time.perf_counter()
    for _ in range(2):
        await ours.engine.run([work.as_pass("bench")])
    tally.rates["trained"].append(2 * work.tokens / (time.perf_counter() - start))


async def _sampling(
    ours: EngineDriver, tally: Tally, gaps: list[float], seeds: count[int], over: asyncio.Event | None
) -> None:
    start, tokens, rounds = time.perf_counter(), 0, 0
    while (rounds < 2) if over is None else not over.is_set():
        prompts = questions(PROMPTS, seed=next(seeds))
        await ours.sampling(prompts, "version", SAMPLES, TOKENS, partial(_listener, gaps))
        tokens += PROMPTS * SAMPLES * TOKENS
        rounds += 1
    tally.rates["sampled"].append(tokens / (time.perf_counter() - start))


def _listener(gaps: list[float]) -> Callable[[SequenceDelta], None]:
    """The `on_delta` of one request; its sequences advance together, so the gaps of one are enough."""
    last = [0.0]

    def on_delta(piece: SequenceDelta) -> None:
        now = time.perf_counter()
        if piece.sample == 0:
            if last[0]:
                gaps.append(now - last[0])
            last[0] = now

    return on_delta


def _per_s(values: list[float]) -> str:
    return f"{percentile(values, 0.5):,.0f} tokens/s"
