"""The report of the simulations: `python -m benchmarks.scale.report` writes benchmarks/results/scale.{md,png}.

It reads scale.json (`benchmarks.scale.experiments`), scale-check.json (`benchmarks.scale.check`) and replicas.json
(`benchmarks.scale.replicas`).
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.hardware import Hardware
from benchmarks.scale.replicas import Turn, ratios

FOLDER = Path("benchmarks/results")
HOURS_BETWEEN_FAILURES = 50_000.0
"""GPU-hours between two interruptions: 419 in 54 days on 16,384 GPUs (the report on Llama 3), in round numbers."""
LOST = (
    "death",
    "routing",
    "publication",
    "load of versions",
    "API process",
    "scheduling",
    "fixed cost and uneven shares",
)

Figures = Mapping[str, Any]


def write(folder: Path) -> None:
    """Write the Markdown page and the chart."""
    results = json.loads((folder / "scale.json").read_text())
    check = json.loads((folder / "scale-check.json").read_text())
    turns = [Turn(**each) for each in json.loads((folder / "replicas.json").read_text())]
    parts = [
        _INTRODUCTION,
        _replicas(turns),
        _check(check),
        _policies(results["policies"]),
        _sizes(results["sizes"], results["cells"]),
        _lost(results),
        _ratios(results["ratios"], results["loads"]),
        _waits([*results["sizes"], *results["loads"]], results["loads"]),
        _failures(results["failures"]),
        _needed(results["sizes"], results["loads"], results["cells"]),
    ]
    (folder / "scale.md").write_text("\n\n".join(parts) + "\n")
    _draw(folder / "scale.png", results)


_INTRODUCTION = """# Scale (`benchmarks/scale`)

The service's own admission queue, sampler pool with its prefix table, selection of training requests and shares of
ranks run in simulated time over engines as arithmetic (`benchmarks/scale/hardware.py`: figures of a 4B model on a GPU
of the H100 class, assumed; CPU times of the API process, measured). A third of the active tenants trains on groups of
eight answers, a third runs agents of 6 to 40 turns, a third fine-tunes; their batches are of sizes 1 to 32 by Zipf's
law, one after the other without pause. A GPU counts as used while it computes. **No GPU was at hand**: the figures
say how the service divides work, not how fast a GPU is.

![Use, hits and waits by size](scale.png)"""


def _replicas(turns: list[Turn]) -> str:
    by_time, by_cpu = ratios(turns)
    rows = [
        (name, f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}")
        for name, values in (("tokens/s", by_time), ("tokens per CPU second of a replica, twice", by_cpu))
    ]
    return f"""## Two sampler processes against one (measured)

SmolLM2-135M in float32, one thread each, {len(by_time)} pairs of turns, while other programs used the same two cores
(`python -m benchmarks.scale.replicas`).

{_table(("two processes by one", "median", "range"), rows)}"""


def _check(lines: Sequence[Figures]) -> str:
    rows = [
        (
            line["engine"],
            str(line["replicas"]),
            ", ".join(f"{value:.1f}" for value in line["real_s"]),
            ", ".join(f"{value:.1f}" for value in line["simulated_s"]),
            _percent(line["error"]),
        )
        for line in lines
    ]
    return f"""## The simulation against processes (measured)

The same requests through the service's pool over real processes, and in simulated time (`python -m
benchmarks.scale.check`). `sleeps`: sampler processes that sleep for each step as long as the arithmetic says, so that
two cores carry four of them. `torch`: SmolLM2-135M with one thread each, in CPU seconds of a process, since other
programs use the same cores; the arithmetic is fitted to one process before each run. Training was not compared.

{_table(("engine", "processes", "real, s", "simulated, s", "error, median"), rows)}"""


def _policies(lines: Sequence[Figures]) -> str:
    rows = [
        (
            str(line["turns"]),
            line["policy"],
            f"{line['hits']:.3f} of {line['most']:.3f}",
            f"{line['busiest']:.2f}",
            f"{line['slow_down']:.2f}",
        )
        for line in lines
    ]
    header = (
        "turns",
        "policy",
        "prompt tokens found in caches",
        "busiest replica / mean",
        "p99 slow-down against the mean load",
    )
    return f"""## Routing

64 replicas, 1,000 clients with 8 conversations under one prompt each; with six turns all share a system prompt of 200
tokens and grow. The most is what one endless cache finds, in whole blocks of 64 tokens.

{_table(header, rows)}"""


def _sizes(lines: Sequence[Figures], cells: Sequence[Figures]) -> str:
    rows = [_row(line["name"], line) for line in lines]
    rows.append(_row(f"1,000 GPUs: {len(cells)} cells of 63", _mean(cells)))
    worst = min(min(line["sampler_use"], line["trainer_use"]) for line in cells)
    return f"""## Sizes

One active tenant a GPU: 10,000 tenants on 1,000 GPUs, of whom 90 % are idle. A quarter of the GPUs trains.

{_table(_HEADER, rows)}

In the worst cell {_percent(worst)} of a kind of GPU is used where there is work. Used means that a GPU computes, not
that it computes much: a replica decodes 10,000 tokens/s only with 256 answers at once, and here its tenants wait for
their steps between batches. With three times the tenants it samples three times as much (below).
The simulated time is 60 s up to 64 GPUs, 20 s at 256 and 10 s in the cells: conversations are shorter in the latter, so
less of their prompts can be found in caches."""


_HEADER = (
    "", "samplers used", "trainers used", "hits", "most", "sampled tokens/s a GPU", "trained tokens/s a GPU",
    "API core",
)  # fmt: skip


def _row(name: str, line: Figures) -> tuple[str, ...]:
    return (
        name,
        f"{line['sampler_use']:.3f}",
        f"{line['trainer_use']:.3f}",
        f"{line['hits']:.3f}",
        f"{line['most']:.3f}",
        f"{line['sampled_per_gpu']:,.0f}",
        f"{line['trained_per_gpu']:,.0f}",
        _percent(line["api_busy"]),
    )


def _mean(lines: Sequence[Figures]) -> dict[str, float]:
    """Mean of the numbers of several simulations."""
    return {
        name: statistics.fmean(line[name] for line in lines)
        for name, value in lines[0].items()
        if isinstance(value, int | float)
    }


def _lost(results: Mapping[str, Sequence[Figures]]) -> str:
    lines = [*results["sizes"], *results["loads"]]
    rows = []
    for line in lines:
        seconds = {**line["sampler_seconds"]}
        for reason, value in line["trainer_seconds"].items():
            seconds[reason] = seconds.get(reason, 0.0) + value
        total = sum(seconds.values())
        shares = [f"{100 * seconds.get(reason, 0.0) / total:.2f}" for reason in ("used", "no work", *LOST)]
        rows.append((line["name"], *shares))
    return f"""## Where GPU-seconds go

In per cent of all.

{_table(("", "used", "no work", *LOST), rows)}"""


def _ratios(ratios_of: Sequence[Figures], loads: Sequence[Figures]) -> str:
    rows = [_row(f"{line['name']} trainers to samplers", line) for line in ratios_of]
    rows += [_row(f"{line['name']}, 16:48", line) for line in loads]
    return f"""## Ratios and loads, 64 GPUs

{_table(_HEADER, rows)}"""


def _waits(lines: Sequence[Figures], loads: Sequence[Figures]) -> str:
    fairness = ", ".join(f"{line['jain']:.2f} with {line['name']}" for line in loads)
    columns = list(itertools.product(("sample", "pass"), ("small", "large"), ("p50", "p99")))
    rows = [(line["name"], *(f"{line[f'{who}_{kind}_{part}']:.2f}" for kind, who, part in columns)) for line in lines]
    header = ("", *map(", ".join, columns))
    return f"""## Waits of small tenants beside large ones

Seconds from a sample's request until its decoding begins, and seconds that a pass takes more than it would alone.
Small: batches of size 1; large: of 8 to 32.

{_table(header, rows)}

Owners get equal parts of the trainers, so a small tenant's pass is not held up by a large one's. Jain's index of the
speeds (time of a batch on an idle cell by its time here, of the tenants that finished one): {fairness}. It falls with
the load because kinds differ: a supervised batch is training only and slows down most, a group's is mostly sampling."""


def _failures(lines: Sequence[Figures]) -> str:
    quiet, replica, rank = lines

    def done(line: Figures) -> float:
        return line["sampled_per_gpu"] * line["samplers"] * line["seconds"]

    dead_s = [line["sampler_seconds"].get("death", 0.0) for line in lines]
    # The whole cell: its samplers run out of work while their tenants wait for a step.
    rank_s = (1 - done(rank) / done(quiet)) * rank["seconds"] * rank["gpus"]
    rows = []
    for name, cost in (("replica", dead_s[1]), (f"rank of a group of {rank['trainers']}", rank_s)):
        hourly = cost / 3600 / HOURS_BETWEEN_FAILURES
        rows.append((name, f"{cost:,.0f}", f"{100 * hourly:.5f} %"))
    load = Hardware()
    return f"""## Deaths

A death is noticed after {load.notice_s:.0f} s and its process is back after {load.load_s:.0f} s more. Lost are, of a
replica, the GPU-seconds until then; of a rank, the tokens that the whole cell of {rank["gpus"]} GPUs does not sample
meanwhile: all ranks wait, what no captured state covers runs again ({rank["undone_s"]:.0f} s of it), and the samplers'
tenants wait for a step. At one interruption in {HOURS_BETWEEN_FAILURES:,.0f} GPU-hours that is, of all GPU-seconds:

{_table(("death of a", "GPU-seconds lost", "of all, at the published rate"), rows)}

Samples moved to another replica at its death: {replica["moved"]}; none failed. Sampled tokens in the
{quiet["seconds"]:.0f} s: {done(quiet):,.0f} without a death, {done(replica):,.0f} with that of a replica,
{done(rank):,.0f} with that of a rank. The second cost grows with the cell, as do the deaths in it: with 1,000 GPUs
in one group a death in two days would stop all of them for a minute, which is why cells are small."""


def _needed(lines: Sequence[Figures], loads: Sequence[Figures], cells: Sequence[Figures]) -> str:
    rows = [
        (line["name"], str(line["gpus"]), f"{line['api_busy']:.2f}", f"{0.7 * line['gpus'] / line['api_busy']:,.0f}")
        for line in [*lines, *loads]
        if line["api_busy"]
    ]
    busy = [line["api_busy"] for line in cells]
    return f"""## API processes and cells

{_table(("", "GPUs", "API core, busy", "GPUs at which 70 % of it is busy"), rows)}

With {len(cells)} cells the API process of a cell is busy for {_percent(min(busy))} to {_percent(max(busy))} of the
time. What a GPU costs the API process grows with the requests that it serves, so with its load: see the last lines."""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _draw(file: Path, results: Mapping[str, Sequence[Figures]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = [*results["sizes"][:3], {**_mean(results["cells"]), "gpus": 1000}]
    gpus = [line["gpus"] for line in lines]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    for name, label in (
        ("sampler_use", "samplers used"),
        ("trainer_use", "trainers used"),
        ("api_busy", "API core busy"),
    ):
        axes[0].plot(gpus, [line[name] for line in lines], "o-", label=label)
    axes[0].set_ylim(0, 1.05)
    axes[0].set_title("use where there is work")
    for name in ("most", "hits"):
        axes[1].plot(gpus, [line[name] for line in lines], "o-", label=name)
    axes[1].set_title("prompt tokens found in caches")
    for who in ("small", "large"):
        for kind in ("sample", "pass"):
            axes[2].plot(
                gpus, [max(0.01, line[f"{who}_{kind}_p99"]) for line in lines], "o-", label=f"{kind}, {who} tenants"
            )
    axes[2].set_yscale("log")
    axes[2].set_title("99th percentile of waits, s")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(gpus, [f"{count:,}" for count in gpus])
        axis.set_xlabel("GPUs (1,000: 16 cells)")
        axis.minorticks_off()
        axis.legend(fontsize=8)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    write(FOLDER)
