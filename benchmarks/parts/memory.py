"""Peak memory of one GRPO batch above the loaded base, in this process alone (a part has a process of its own).

Counted is everything from the moment at which the base stands: adapter, gradients, moments, activations. Linux keeps
the peak; writing 5 to /proc/self/clear_refs resets it.
"""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.comparison import Line, Setting
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import grpo

RANK = 32


def measure(setting: Setting) -> list[Line]:
    """EngineDriver, then PEFT's own peak on its longest eight rows, for comparison."""
    work = grpo()
    ours = EngineDriver(setting)
    base = _settled()
    peaks = []
    ours.create("bench", RANK)
    for _ in range(2):  # the second has moments from the start
        reset_peak()
        ours.run(work.as_pass("bench"))
        ours.step("bench")
        peaks.append((peak() - base) / 1e9)
    ours.close()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        theirs = apart.submit(_theirs, setting).result()
    return [
        Line(
            work="peak memory of the GRPO batch above the loaded base",
            baseline=f"(PEFT on its first 8 rows: {theirs:.2f} GB)",
            unit="GB",
            least=1.5,
            aim=1.0,
            values=peaks,
            ours=f"{max(peaks):.2f} GB",
            note=f"the loaded base takes {base / 1e9:.2f} GB",
            lower=True,
        )
    ]


def _theirs(setting: Setting) -> float:
    from benchmarks.baseline import ROWS, Baseline, load

    theirs, work = Baseline(load(setting), RANK), grpo()
    before = _settled()
    reset_peak()
    theirs.train(work.rows[:ROWS], work.prompts[:ROWS])
    return (peak() - before) / 1e9


def _settled() -> int:
    gc.collect()
    return resident()


def reset_peak() -> None:
    """Reset the peak that `peak` returns."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Peak resident bytes since the last reset."""
    return _status("VmHWM")


def resident() -> int:
    """Resident bytes now."""
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
