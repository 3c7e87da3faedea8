"""The simulations of the report, by name: `python -m benchmarks.scale.experiments sizes cells`.

Each writes its part of benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale import routing
from benchmarks.scale.cell import Outcome, Plan, run_plan

RESULTS = Path("benchmarks/results/scale.json")
SMALL, LARGE = range(1, 2), range(8, 33)
"""Sizes of tenants: about half of them are small, an eighth large."""
CELLS = 16


def line(name: str, outcome: Outcome, cores: float = 1.0) -> dict[str, Any]:
    """The figures of a simulation."""
    plan = outcome.plan
    speeds = np.array(outcome.speeds())
    figures: dict[str, Any] = {
        "name": name,
        "gpus": plan.trainers + plan.samplers,
        "trainers": plan.trainers,
        "samplers": plan.samplers,
        "tenants": plan.tenants,
        "seconds": plan.seconds,
        "sampler_use": outcome.utilisation(outcome.samplers),
        "trainer_use": outcome.utilisation(outcome.trainers),
        "sampler_seconds": dict(outcome.samplers),
        "trainer_seconds": dict(outcome.trainers),
        "hits": outcome.hits,
        "most": outcome.most,
        "sequences": outcome.sequences,
        "sampled_per_gpu": outcome.sampled_tokens / plan.seconds / plan.samplers,
        "trained_per_gpu": outcome.trained_tokens / plan.seconds / plan.trainers,
        "api_busy": outcome.api_busy_s / plan.seconds if math.isfinite(cores) else 0.0,
        "busiest": outcome.busiest,
        "moved": outcome.moved,
        "undone_s": outcome.undone_s,
        "jain": float(speeds.sum() ** 2 / len(speeds) / (speeds**2).sum()) if len(speeds) else 1.0,
    }
    for label, sizes in (("small", SMALL), ("large", LARGE)):
        for kind in ("sample", "pass"):
            waits = outcome.waits(sizes, passes=kind == "pass")
            figures[f"{label}_{kind}_p50"], figures[f"{label}_{kind}_p99"] = (
                np.percentile(waits, [50, 99]).tolist() if waits else (0.0, 0.0)
            )
    return figures


def _simulated(name: str, **plan: Any) -> dict[str, Any]:
    start = time.perf_counter()
    figures = line(name, run_plan(Plan(**plan)), plan.get("api_cores", 1.0))
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return figures


def sizes() -> list[dict[str, Any]]:
    """One cell of each size, a quarter of whose GPUs train, with one active tenant a GPU."""
    results = [
        _simulated(f"{gpus} GPUs", trainers=gpus // 4, samplers=gpus - gpus // 4, tenants=gpus, seconds=seconds)
        for gpus, seconds in ((8, 60.0), (64, 60.0), (256, 20.0))
    ]
    free = _simulated(
        "256 GPUs, no limit of the API", trainers=64, samplers=192, tenants=256, seconds=20.0, api_cores=math.inf
    )
    return [*results, free]


def cells() -> list[dict[str, Any]]:
    """1,000 GPUs in cells: the active tenants fall into them by the hash of their names."""
    counts = np.random.default_rng(7).multinomial(1000, [1 / CELLS] * CELLS)
    return [
        _simulated(f"cell {index + 1}", trainers=16, samplers=47, tenants=int(count), seconds=10.0, seed=index + 1)
        for index, count in enumerate(counts)
    ]


def ratios() -> list[dict[str, Any]]:
    """64 GPUs, trainers to samplers from 1:1 to 1:4."""
    return [
        _simulated(f"{trainers}:{64 - trainers}", trainers=trainers, samplers=64 - trainers, tenants=64, seconds=30.0)
        for trainers in (32, 21, 16, 13)
    ]


def loads() -> list[dict[str, Any]]:
    """64 GPUs under few and many active tenants."""
    return [
        _simulated(f"{count} tenants", trainers=16, samplers=48, tenants=count, seconds=20.0) for count in (16, 64, 192)
    ]


def failures() -> list[dict[str, Any]]:
    """32 GPUs for two minutes: quiet, with a death of a replica, and with one of a rank."""
    base: dict[str, Any] = {"trainers": 8, "samplers": 24, "tenants": 32, "seconds": 120.0}
    return [
        _simulated("quiet", **base),
        _simulated("a replica dies", **base, sampler_deaths=(0.2,)),
        _simulated("a rank dies", **base, trainer_deaths=(0.2,)),
    ]


def policies() -> list[dict[str, Any]]:
    """Routing policies, with one turn and with six."""
    return [{"turns": turns, **dataclasses.asdict(each)} for turns in (1, 6) for each in routing.compare(turns)]


EXPERIMENTS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "policies": policies,
    "sizes": sizes,
    "ratios": ratios,
    "loads": loads,
    "failures": failures,
    "cells": cells,
}


def run(names: Sequence[str], results: Path) -> None:
    """Run experiments; each is written when it is done."""
    for name in names:
        figures = EXPERIMENTS[name]()
        written = json.loads(results.read_text()) if results.is_file() else {}
        results.write_text(json.dumps({**written, name: figures}, indent=1) + "\n")


def main() -> None:
    """Run the experiments that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXPERIMENTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    run(args.names, args.results)


if __name__ == "__main__":
    main()
