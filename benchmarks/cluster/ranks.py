"""Training by two ranks with a core each against one engine with one core: tokens per second and CPU time per token.

    python -m benchmarks.cluster.ranks [--model NAME] [--rounds 5]

Each round runs the same request and step on the one engine and on the group, in turns. Wall time says something on a
machine that does nothing else: two ranks need both cores at once, so that one other busy process costs them more than
the engine. Wall time without the time in which a process was ready and had no core (Linux counts it), and CPU time,
which counts what the ranks do beside the rows, say something on any machine. Writes results/ranks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.trainers.group import start_group
from tinsmith.engine.config import DEFAULT_MODEL, EngineConfig
from tinsmith.engine.processes.client import start_local
from tinsmith.engine.processes.slots import LocalSlots

RESULTS = Path(__file__).parents[1] / "results" / "ranks.md"
MODEL = "m"
GROUPS, ANSWERS, PROMPT, ANSWER = 4, 4, 48, 64
"""Groups of answers to one prompt each, and tokens of a prompt and of an answer."""


@dataclass(slots=True)
class Measured:
    """Seconds of each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)
    """CPU time of the process that took most: the wall time where each has a core for itself."""
    unhindered: list[float] = field(default_factory=list)
    """Wall time less the longest time that a process waited for a core. One that waits for the other's part of a sum
    waits for its core too, so this is an upper bound of the wall time on free cores."""


def request(seed: int, vocabulary: int) -> Pass:
    """Groups of answers with weights on the answers."""
    draw = np.random.default_rng(seed)
    data = []
    for _ in range(GROUPS):
        prompt = draw.integers(10, vocabulary, PROMPT)
        for _ in range(ANSWERS):
            tokens = np.append(prompt, draw.integers(10, vocabulary, ANSWER)).astype(np.int32)
            weights = (np.arange(len(tokens)) >= PROMPT - 1).astype(np.float32)
            data.append(Datum(tokens=tokens, targets=np.roll(tokens, -1).astype(np.int64), inputs={"weights": weights}))
    return Pass(model_id=MODEL, data=tuple(data), loss_fn="cross_entropy")


def cpu_seconds(pids: list[int]) -> np.ndarray:
    """CPU time of each process so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return np.array([each.user + each.system for each in times])


def queued_seconds(pids: list[int]) -> np.ndarray:
    """Time in which the main thread of each process, which computes, was ready and had no core."""
    return np.array([int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9 for pid in pids])


async def one_round(engine: Any, pids: list[int], passes: Pass, measured: Measured | None) -> None:
    """A request and a step."""
    wall, cpu, queued = time.perf_counter(), cpu_seconds(pids), queued_seconds(pids)
    await engine.run([passes])
    await engine.step(MODEL, AdamParams(learning_rate=1e-4))
    if measured is not None:
        measured.wall.append(time.perf_counter() - wall)
        measured.unhindered.append(measured.wall[-1] - float((queued_seconds(pids) - queued).max()))
        spent = cpu_seconds(pids) - cpu
        measured.cpu.append(float(spent.sum()))
        measured.busiest.append(float(spent.max()))


async def measure(source: str, rounds: int) -> tuple[Measured, Measured]:
    """One engine, and two ranks."""
    config = EngineConfig(source=source, device="cpu", threads=1)
    slots = LocalSlots()
    single = await start_local(config)
    group = await start_group(await slots.reserve(2, name="trainer"), config, ClusterConfig(trainers=2), 1)
    results = Measured(), Measured()
    try:
        for engine in (single, group):
            await engine.create(MODEL, LoraSpec(rank=16, seed=0))
        for number in range(-1, rounds):  # the first round is not measured
            passes = request(number + 1, single.card.vocab_size)
            for engine, pids, measured in ((single, [single.pid], results[0]), (group, group.pids, results[1])):
                await one_round(engine, pids, passes, measured if number >= 0 else None)
    finally:
        await single.close()
        await group.close()
        await slots.close()
    return results


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    single, group = asyncio.run(measure(options.model, options.rounds))
    tokens = GROUPS * ANSWERS * (PROMPT + ANSWER)
    speed_up = statistics.median(alone / shared for alone, shared in zip(single.wall, group.wall, strict=True))
    overhead = statistics.median(shared / alone for alone, shared in zip(single.cpu, group.cpu, strict=True))
    unhindered = statistics.median(
        alone / shared for alone, shared in zip(single.unhindered, group.unhindered, strict=True)
    )
    share = statistics.median(alone / shared for alone, shared in zip(single.busiest, group.busiest, strict=True))
    lines = [
        "# Two ranks against one engine",
        "",
        f"{options.model}, a core each, {tokens:,} tokens a request ({GROUPS} groups of {ANSWERS} answers), one step",
        f"after each; medians of {options.rounds} rounds in turns. Load of the machine at the end: "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "| | one engine | two ranks | ratio |",
        "|---|---|---|---|",
        f"| tokens/s | {tokens / statistics.median(single.wall):.0f} | {tokens / statistics.median(group.wall):.0f} | "
        f"{speed_up:.2f} |",
        f"| tokens/s, without waiting for a core | {tokens / statistics.median(single.unhindered):.0f} | "
        f"{tokens / statistics.median(group.unhindered):.0f} | {unhindered:.2f} |",
        f"| CPU ms per 1,000 tokens | {1e6 * statistics.median(single.cpu) / tokens:.0f} | "
        f"{1e6 * statistics.median(group.cpu) / tokens:.0f} | {overhead:.2f} |",
        f"| of the busiest process | {1e6 * statistics.median(single.busiest) / tokens:.0f} | "
        f"{1e6 * statistics.median(group.busiest) / tokens:.0f} | {share:.2f} |",
    ]
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
