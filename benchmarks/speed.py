"""Measurement of all promises about speed and memory: `make bench`, or `python -m benchmarks.speed --only step`.

Each part runs in its own process, and its lines are written to benchmarks/results/speed.{json,md,png} at once, without
changing those of other parts. So a part that fails, or a run that is stopped, loses no other results: `--missing`
continues.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import table
from benchmarks.apart import run_apart
from benchmarks.comparison import Line, Setting
from benchmarks.instructions import LIMITS

PARTS = {
    "training": "benchmarks.parts.training",
    "training32": "benchmarks.parts.training32",
    "tenants": "benchmarks.parts.tenants",
    "sampling": "benchmarks.parts.sampling",
    "vllm": "benchmarks.parts.vllm.measurement",
    "conversations": "benchmarks.parts.conversations",
    "switching": "benchmarks.parts.switching",
    "http": "benchmarks.parts.http.batch",
    "smallest-step": "benchmarks.parts.http.smallest_step",
    "step": "benchmarks.parts.rl_step",
    "trees": "benchmarks.parts.trees.measurement",
    "memory": "benchmarks.parts.memory",
    "agreement": "benchmarks.parts.agreement",
    "sharing": "benchmarks.parts.sharing",
    "shadow": "benchmarks.parts.shadow",
    "hybrids": "benchmarks.parts.hybrids",
    "mixtures": "benchmarks.parts.mixtures.measurement",
}
PART_S = 1800.0
"""Time limit of a part."""
RESULTS = Path(__file__).parent / "results"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main() -> None:
    """Measure the chosen parts, each in its own process; exits with 1 if one failed."""
    arguments = _arguments()
    if arguments.into:
        _measure(arguments)
        return
    results = RESULTS / (arguments.name or ("speed" if arguments.dtype == "auto" else f"speed-{arguments.dtype}"))
    arguments.dtype = _dtype(arguments)
    parts = table.read(results)
    failed = []
    for part in arguments.only or PARTS:
        if arguments.missing and part in parts:
            continue
        began = time.monotonic()
        lines = _apart(part, arguments)
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if lines is None:
            failed.append(part)
            continue
        parts[part] = table.Part(measured=time.strftime("%Y-%m-%d %H:%M"), machine=_machine(arguments), lines=lines)
        table.write(results, parts, list(PARTS))
    print(results.with_suffix(".md").read_text())
    if failed:
        sys.exit(f"These parts failed, and their lines are as they were: {', '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts")
    parser.add_argument("--missing", action="store_true", help="only parts that have no result yet")
    parser.add_argument("--model", default=MODEL, help="a hub id, a folder or a GGUF file")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of both sides")
    parser.add_argument("--turns", type=int, default=3, help="turns of long work; short work has more")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="dtype of the base model on both sides; auto: the one that the engine takes on this machine",
    )
    parser.add_argument(
        "--instructions",
        choices=list(LIMITS),
        help="limit both sides to these instructions; needs --dtype float32",
    )
    parser.add_argument("--name", help="of the files in benchmarks/results: speed, or speed-DTYPE")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.instructions and arguments.dtype != "float32":
        parser.error(f"--instructions {arguments.instructions} measures float32 alone: add --dtype float32")
    return arguments


def _dtype(arguments: argparse.Namespace) -> str:
    if arguments.dtype != "auto":
        return arguments.dtype
    import torch
    from transformers import AutoConfig

    from tinsmith.engine.model import loading, precision, sources

    settings = AutoConfig.from_pretrained(sources.locate(arguments.model).folder)
    return precision.dtype_name(loading.dtype_of("auto", torch.device("cpu"), settings))


def _apart(part: str, arguments: argparse.Namespace) -> list[Line] | None:
    """One part in a child process; None if it failed or did not end in time."""
    command = [sys.executable, "-m", "benchmarks.speed", "--only", part, "--dtype", arguments.dtype]
    command += ["--model", arguments.model, "--threads", str(arguments.threads), "--turns", str(arguments.turns)]
    environment = {
        **os.environ,
        **LIMITS.get(arguments.instructions, {}),
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    ending = run_apart(lambda file: [*command, "--into", str(file)], PART_S, environment=environment)
    if ending.result is None or ending.error:
        print(f"{part}: {ending.error}", file=sys.stderr, flush=True)
        return None
    return [Line(**line) for line in json.loads(ending.result)]


def _measure(arguments: argparse.Namespace) -> None:
    """Measure one part, in the child process."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch

    from tinsmith.engine.model.sources import locate

    torch.set_num_threads(arguments.threads)
    folder = Path(locate(arguments.model).folder)
    setting = Setting(folder=folder, threads=arguments.threads, turns=arguments.turns, dtype=arguments.dtype)
    lines: Sequence[Line] = importlib.import_module(PARTS[arguments.only[0]]).measure(setting)
    arguments.into.write_text(json.dumps([asdict(line) for line in lines]))


def _machine(arguments: argparse.Namespace) -> str:
    limit = f", limited to {arguments.instructions.upper()}" if arguments.instructions else ""
    return f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, {table.machine()}{limit}"


if __name__ == "__main__":
    main()
