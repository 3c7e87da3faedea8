"""Scaling curves of cost: `make bench-growth`, or `python -m benchmarks.growth --only rank length`.

Tokens/s, and the memory above the loaded base, against tenants in a pass, rank, length of a row, group size under one
prompt, samples in a batch, the share of a prompt that is cached, versions of weights, and clients. The points of a
curve are measured interleaved in one process; the chart shows the median and the range. Each curve has its own process,
so that memory is measured separately, and is written to benchmarks/results/growth.{json,md,png} at once.

The exponent of a curve is fitted to log(time of a token) over log(size), by least squares. The whole cost grows
linearly where it is 0 if the work grows with the size, as with clients, and where it is 1 if the work stays the same,
as with ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks import table
from benchmarks.comparison import Setting, timed
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.http.smallest_step import TOKENS as TOKENS_OF_STEP
from benchmarks.parts.http.smallest_step import tiny_service
from benchmarks.parts.memory import peak, reset_peak, resident
from benchmarks.parts.tenants import passes
from benchmarks.servers import Watch
from benchmarks.speed import MODEL, RESULTS
from benchmarks.workloads import Batch, grpo, questions, rows_of
from tests.architectures import save_tiny
from tests.models import VOCABULARY

TOKENS = 24
"""Tokens of each sample."""
CACHE = 131_072
LONG = 32_768
STEPS = 320
"""Steps of all clients together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size: tokens/s turn by turn, and the most bytes above the loaded base.

    Example: Point(size=8, tokens_per_s=[900.0, 950.0], memory=400_000_000)
    """

    size: int
    tokens_per_s: list[float]
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve: what varies, what is counted, and the points."""

    varies: str
    work: str
    points: list[Point]
    grows: bool = False
    """Whether the tokens grow with the size."""


Job = Callable[[], int]
"""Does the work once and returns the number of tokens as a user counts them."""


def tenants(setting: Setting) -> Curve:
    """64 rows of 32 tokens, of 1 to 64 tenants."""
    ours, rows = EngineDriver(setting), rows_of(32, 64)
    for tenant in range(64):
        ours.create(f"tenant-{tenant}", 8, seed=tenant)
    each = passes(rows)

    def job(size: int) -> Job:
        shared = [replace(data_pass, model_id=f"tenant-{at % size}") for at, data_pass in enumerate(each)]
        return lambda: (ours.run(*shared), rows.tokens)[1]

    return _curve(setting, ours, "tenants in a pass", "training on 64 rows of 32, rank 8", (1, 4, 16, 64), job)


def rank(setting: Setting) -> Curve:
    """A GRPO batch of four groups of four under adapters of rank 8 to 128."""
    ours, work = EngineDriver(setting), grpo(groups=4, group=4)

    def job(size: int) -> Job:
        ours.create(f"rank-{size}", size)
        return lambda: (ours.run(work.as_pass(f"rank-{size}")), work.tokens)[1]

    return _curve(setting, ours, "rank", f"training on {work.name}", (8, 32, 128), job)


def length(setting: Setting) -> Curve:
    """4,096 tokens in rows of 128 to 4,096."""
    ours = EngineDriver(setting)
    ours.create("bench", 32)

    def job(size: int) -> Job:
        work = rows_of(size, 4096 // size)
        return lambda: (ours.run(work.as_pass("bench")), work.tokens)[1]

    return _curve(setting, ours, "length of a row", "training on 4,096 tokens, rank 32", (128, 512, 2048, 4096), job)


def group(setting: Setting) -> Curve:
    """One prompt of 150 tokens with 1 to 32 samples."""
    ours = EngineDriver(setting)
    ours.create("bench", 32)

    def job(size: int) -> Job:
        work = grpo(groups=1, group=size)
        return lambda: (ours.run(work.as_pass("bench")), work.tokens)[1]

    curve = _curve(
        setting, ours, "answers to one prompt", "training, tokens as the user counts them", (1, 4, 16, 32), job
    )
    return replace(curve, grows=True)


def batch(setting: Setting) -> Curve:
    """1 to 256 samples at once, each with its own prompt."""
    ours, seeds = EngineDriver(setting), count(1)

    def job(size: int) -> Job:
        def run() -> int:
            ours.sample(questions(size, 32, seed=next(seeds)), None, 1, TOKENS)
            return size * TOKENS

        return run

    curve = _curve(setting, ours, "samples at once", f"sampling {TOKENS} tokens each", (1, 4, 16, 64, 256), job)
    return replace(curve, grows=True)


def prefix(setting: Setting) -> Curve:
    """16 prompts of 512 tokens, of which 0 to 480 are cached."""
    ours, seeds = EngineDriver(setting, cache_tokens=CACHE), count(1)

    def job(size: int) -> Job:
        cached = questions(16, size, seed=size) if size else [np.empty(0, np.int32)] * 16
        if size:
            ours.sample(cached, None, 1, 1)

        def run() -> int:
            new = questions(16, 512 - size, seed=10_000 + next(seeds))
            ours.sample([np.concatenate(parts) for parts in zip(cached, new, strict=True)], None, 1, 4)
            return 16 * 516

        return run

    work = "16 prompts of 512 tokens, 4 answered; both are counted"
    return _curve(setting, ours, "tokens of each prompt that are cached", work, (0, 128, 256, 384, 480), job)


def long(setting: Setting) -> Curve:
    """One row of 2,048 to 32,768 tokens; a model of one layer, whose attention takes most of the time."""
    shape = {"max_position_embeddings": LONG, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        ours = EngineDriver(replace(setting, folder=save_tiny("llama", Path(folder), **shape)))
    ours.create("bench", 8)

    def job(size: int) -> Job:
        row = rows_of(size, 1)
        work = Batch(name="", rows=[row.rows[0] % VOCABULARY], prompts=row.prompts)
        return lambda: (ours.run(work.as_pass("bench")), work.tokens)[1]

    work = "training on one row, a tiny model of one layer"
    return _curve(setting, ours, "length of a long row", work, (2048, 8192, LONG), job)


def versions(setting: Setting) -> Curve:
    """16 samples from the newest of 1 to 32 versions of a model, all of which can be sampled from."""
    ours, seeds = EngineDriver(setting), count(1)
    ours.create("bench", 8)
    captured: list[str] = []

    def job(size: int) -> Job:
        def run() -> int:
            while len(captured) < size:
                _capture(ours, captured, next(seeds))
            while len(captured) > size:
                ours.wait(ours.engine.detach(captured.pop(0)))
            ours.sample(questions(16, 32, seed=next(seeds)), captured[-1], 1, TOKENS)
            return 16 * TOKENS

        return run

    work = f"sampling 16 times {TOKENS} tokens from one version of rank 8; captures are included"
    return _curve(setting, ours, "versions alive", work, (1, 4, 16, 32), job)


def _capture(ours: EngineDriver, captured: list[str], number: int) -> None:
    ours.run(rows_of(16, 1, number).as_pass("bench"))
    ours.step("bench")
    captured.append(f"version-{number}")
    ours.capture("bench", captured[-1])


def clients(setting: Setting) -> Curve:
    """1 to 64 clients of the SDK, each of which takes the smallest step of a model of its own."""
    sizes = (1, 4, 16, 64)
    with tempfile.TemporaryDirectory() as folder, tiny_service(replace(setting, threads=1), folder, sizes[-1]) as side:
        speeds: dict[int, list[float]] = {size: [] for size in sizes}
        memory = {}
        for turn in range(setting.turns + 1):
            for size in sizes:
                with Watch(side.server) as watch:
                    seconds = timed(lambda size=size: side.turn(size, STEPS // size))
                memory[size] = watch.peak
                if turn:
                    speeds[size].append(TOKENS_OF_STEP * size * (STEPS // size) / seconds)
    points = [Point(size=size, tokens_per_s=speeds[size], memory=memory[size] - memory[sizes[0]]) for size in sizes]
    work = "forward_backward and optim_step of 8 tokens through the SDK, a tiny model; memory above that of one"
    return Curve(varies="clients", work=work, points=points, grows=True)


CURVES: Mapping[str, Callable[[Setting], Curve]] = {
    curve.__name__: curve for curve in (tenants, rank, length, long, group, batch, prefix, versions, clients)
}


def main() -> None:
    """Measure the curves of --only, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CURVES), help="these curves")
    parser.add_argument("--model", default=MODEL, help="a hub id, a folder or a GGUF file")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--name", default="growth", help="of the files in benchmarks/results")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into:
        logging.getLogger("benchmarks").setLevel(logging.INFO)
        from tinsmith.engine.model.sources import locate

        setting = Setting(folder=Path(locate(arguments.model).folder), threads=arguments.threads, turns=arguments.turns)
        arguments.into.write_text(json.dumps(asdict(CURVES[arguments.only[0]](setting))))
        return
    file = RESULTS / f"{arguments.name}.json"
    machine = f"{arguments.model}, {arguments.threads} threads, {table.machine()}, {time.strftime('%Y-%m-%d')}"
    curves = json.loads(file.read_text()) if file.is_file() else {}
    for name in arguments.only or CURVES:
        with tempfile.TemporaryDirectory() as scratch:
            into = Path(scratch) / "curve.json"
            command = [sys.executable, "-m", "benchmarks.growth", "--only", name, "--into", str(into)]
            command += [
                "--model",
                arguments.model,
                "--threads",
                str(arguments.threads),
                "--turns",
                str(arguments.turns),
            ]
            subprocess.run(command, check=True)
            curves[name] = {**json.loads(into.read_text()), "machine": machine}
        _write(file, curves)
        print(f"{name}: done", file=sys.stderr, flush=True)


def _curve(
    setting: Setting, ours: EngineDriver, varies: str, work: str, sizes: Sequence[int], job: Callable[[int], Job]
) -> Curve:
    """Run each size once to warm up and measure memory, smallest first; then time all in turns."""
    base, jobs = resident(), {size: job(size) for size in sizes}
    speeds: dict[int, list[float]] = {size: [] for size in sizes}
    memory = {}
    for size, run in jobs.items():
        reset_peak()
        run()
        memory[size] = max(0, peak() - base)
    for _ in range(setting.turns):
        for size, run in jobs.items():
            tokens: list[int] = []
            seconds = timed(lambda run=run, tokens=tokens: tokens.append(run()))
            speeds[size].append(tokens[0] / seconds)
    ours.close()
    points = [Point(size=size, tokens_per_s=speeds[size], memory=memory[size]) for size in sizes]
    return Curve(varies=varies, work=work, points=points)


def _write(file: Path, curves: Mapping[str, dict]) -> None:
    curves = {name: curves[name] for name in CURVES if name in curves}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(curves, indent=1) + "\n")
    lines = ["# How cost grows", "", "`make bench-growth`. Median of the turns (least to greatest).", ""]
    for curve in curves.values():
        lines += [f"## {curve['varies']}", "", f"{curve['work']}. {curve['machine']}.", ""]
        lines += [f"| {curve['varies']} | tokens/s | above the loaded base |", "|---|---|---|"]
        for point in curve["points"]:
            speed = point["tokens_per_s"]
            speeds = f"{statistics.median(speed):,.0f} ({min(speed):,.0f} to {max(speed):,.0f})"
            lines.append(f"| {point['size']} | {speeds} | {point['memory'] / 1e9:.2f} GB |")
        worst, tokens = (0, "grow with the size") if curve["grows"] else (1, "stay the same")
        text = f"The time of a token has the exponent {_exponent(curve['points']):+.2f}; the tokens {tokens}"
        lines += ["", f"{text}, so that the whole cost is linear at {worst}.", ""]
    file.with_suffix(".md").write_text("\n".join(lines))
    _draw(file.with_suffix(".png"), list(curves.values()))


def _exponent(points: Sequence[dict]) -> float:
    """Fitted to log(time of a token) over log(size)."""
    measured = [point for point in points if point["size"]]
    sizes = [math.log(point["size"]) for point in measured]
    times = [-math.log(statistics.median(point["tokens_per_s"])) for point in measured]
    return statistics.linear_regression(sizes, times)[0]


def _draw(file: Path, curves: Sequence[dict]) -> None:
    """Small multiples: tokens/s with their range, and memory on a second axis."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(3, 3, figsize=(13, 10), layout="constrained")
    for pane, curve in zip(panes.flat, curves, strict=False):
        sizes = [point["size"] for point in curve["points"]]
        places = range(len(sizes))
        speeds = [point["tokens_per_s"] for point in curve["points"]]
        middle = [statistics.median(speed) for speed in speeds]
        pane.fill_between(places, [min(s) for s in speeds], [max(s) for s in speeds], color="#1565c0", alpha=0.2)
        pane.plot(places, middle, color="#1565c0", marker="o")
        pane.set_ylim(bottom=0)
        pane.set_xticks(places, [f"{size:,}" for size in sizes])
        pane.set_xlabel(curve["varies"])
        pane.set_ylabel("tokens/s", color="#1565c0")
        pane.set_title(curve["work"], fontsize=8)
        beside = pane.twinx()
        beside.plot(places, [point["memory"] / 1e9 for point in curve["points"]], color="#ef6c00", marker=".", ls="--")
        beside.set_ylim(bottom=0)
        beside.set_ylabel("GB above the base", color="#ef6c00")
    for pane in list(panes.flat)[len(curves) :]:
        pane.axis("off")
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
