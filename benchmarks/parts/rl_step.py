"""One RL step of the demo at staleness 0, and of one with 64 rollouts: how much of it is neither sampling nor training.

The demo's own run file against a service of its own. Its policy is wrapped: sampling is the time in which any request
for replies is open, training the time of an update. What is left of a step is the harness: tasks, rewards, advantages,
data, logs, and the capture of the new version.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.comparison import Line, Setting
from benchmarks.servers import KEY, MODEL, tinsmith
from tinsmith.rl import demo
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.record.monitors.jsonl import read_metrics
from tinsmith.rl.run.loop import train

QUIET = ("eval.every=0", "eval.before=false", "eval.after=false", "eval.baseline=0", "checkpoint.every=0")
"""Steps alone."""


SIZES = ("", "groups_per_step=8 group_size=8")
"""The demo's own, and 64 rollouts: the less a step samples, the more its own work weighs."""


def measure(setting: Setting) -> list[Line]:
    """A line for each size; a lower ratio is better."""
    steps = 2 + 3 * setting.turns
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        with tinsmith(setting.folder, setting.dtype, where / "service", setting.threads) as service:
            for number, size in enumerate(SIZES):
                overrides = [f"steps={steps}", f"model.name={MODEL}", *QUIET, *size.split()]
                config = demo.settings(quick=False, seed=0, out=where / f"run-{number}", overrides=overrides)
                shares = asyncio.run(_run(config, service.url))
                lines.append(_line(config, shares, list(read_metrics(where / f"run-{number}"))))
    return lines


def _line(config: RunConfig, shares: list[tuple[float, float]], rows: list[dict[str, float]]) -> Line:
    """One line. Left out: steps without differing rewards, which update nothing, the first step (warm-up) and the last
    (which saves)."""
    took = [row["time/step"] for row in rows if "time/step" in row and not row.get("optim/skipped")]
    used = list(zip(took, shares, strict=True))[1:-1]
    own = [100 * (1 - (sampling + training) / step) for step, (sampling, training) in used]
    note = f"the harness's own share is {_mean(own):.2g} %" if used else "no step had anything to learn from"
    return Line(
        work=f"one RL step of the demo ({config.groups_per_step} x {config.group_size} rollouts), staleness 0",
        baseline="its sampling + its training time",
        unit="x",
        least=1.05,
        aim=1.02,
        values=[step / (sampling + training) for step, (sampling, training) in used],
        ours=f"{_mean([step for step, _ in used]):.2f} s",
        theirs=" + ".join(f"{_mean([parts[at] for _, parts in used]):.2f}" for at in (0, 1)) + " s",
        note=note,
        lower=True,
    )


async def _run(config: RunConfig, url: str) -> list[tuple[float, float]]:
    """(seconds of sampling, of training) of each step."""
    shares: list[tuple[float, float]] = []

    async def connect(state: str, version: int) -> Any:
        policy = await Watched.connect(config.model, url, KEY, seed=0, state=state, version=version)
        assert isinstance(policy, Watched)
        policy.shares = shares
        return policy

    await train(config, connect, Console(file=io.StringIO()))
    return shares


class Watched(TinkerTrainer):
    """A policy whose sampling and training are timed, created by `connect`."""

    shares: list[tuple[float, float]]
    _open, _since, sampled = 0, 0.0, 0.0

    async def snapshot(self) -> Any:
        """The policy's snapshot with timing; every step begins with this call."""
        self.sampled = 0.0
        return (await super().snapshot()).around_each_request(self._timed)

    async def train(self, *arguments: Any) -> Any:
        """Record the times of the finished step."""
        start = time.perf_counter()
        updated = await super().train(*arguments)
        self.shares.append((self.sampled, time.perf_counter() - start))
        return updated

    async def _timed(self, request: SampleRequest, sample: Sample) -> SampleResult:
        """Counts the time in which at least one request for replies is open."""
        if not request.count:
            return await sample(request)
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1
        try:
            return await sample(request)
        finally:
            self._open -= 1
            if not self._open:
                self.sampled += time.perf_counter() - self._since


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
