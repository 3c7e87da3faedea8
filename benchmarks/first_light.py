"""The promises of the first release, measured: `make bench`, or `python -m benchmarks.first_light --quick`.

Training against transformers with PEFT, sampling against `generate`, the service's share of a round trip, and its
memory. Results go to benchmarks/results as JSON and as a markdown table, which is also printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks.contest import HEADER, Contest
from benchmarks.roundtrip import RoundTrip, measure
from tinsmith.engine.config import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure what is asked for, print the table, keep the numbers."""
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from tinsmith.engine.models import locate

    folder, turns = Path(locate(arguments.model).folder), 2 if arguments.quick else 4
    # The service goes first: later this process itself holds two models and keeps the cores warm.
    trip = None if arguments.only == "compute" else measure(folder, arguments.dtype, 20 if arguments.quick else 100)
    contests: list[Contest] = []
    if arguments.only != "service":
        from benchmarks.compute import contests as compute

        contests = compute(folder, arguments.dtype, turns)
    _report(arguments, contests, trip)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a hub id, a folder or a GGUF file")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--only", choices=["compute", "service"], help="half of it")
    parser.add_argument("--name", default="first_light", help="of the files in benchmarks/results")
    return parser.parse_args()


def _report(arguments: argparse.Namespace, contests: list[Contest], trip: RoundTrip | None) -> None:
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}, "
    machine += f"transformers {transformers.__version__}, {arguments.model}, {arguments.dtype}"
    lines = ["# First light", "", f"Measured by `benchmarks/first_light.py` on {machine}.", ""]
    if contests:
        lines += [HEADER, *(contest.row() for contest in contests), ""]
    if trip:
        lines += ["| what | measured | promised below |", "|---|---|---|", *trip.lines(), ""]
    found = {
        "measured": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine,
        "contests": [{**asdict(contest), "ratios": contest.ratios} for contest in contests],
        "round_trip": asdict(trip) if trip else None,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{arguments.name}.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
