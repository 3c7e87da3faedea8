"""Time, memory, launches and waits of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check.shapes import Size

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
DATASHEET_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "4090": 165.0}
"""Dense bfloat16 rate by a part of the card's name, from the cards' datasheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Counts of one piece of work on the device."""

    launches: int
    waits: int
    """Calls in which the host waits for the device."""
    copies_to_host: int
    kernels: tuple[tuple[str, float], ...]
    """The longest kernels with their milliseconds."""


def settle(size: Size) -> None:
    """Wait until the device has finished."""
    if not size.tiny:
        torch.cuda.synchronize()


def seconds(size: Size, work: Callable[[], object], turns: int = 3, warm_up: int = 1) -> float:
    """Median seconds of the work, the device's part included."""
    taken = []
    for turn in range(warm_up + turns):
        settle(size)
        began = time.perf_counter()
        work()
        settle(size)
        if turn >= warm_up:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def peak_gb(size: Size, work: Callable[[], object]) -> float:
    """Peak memory of tensors during the work, in GB; 0 on a CPU."""
    if size.tiny:
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    work()
    settle(size)
    return torch.cuda.max_memory_allocated() / 1e9


def profile(size: Size, work: Callable[[], object], trace: str = "") -> Profile:
    """Launches and waits of the work; with `trace`, a file that a browser's trace viewer opens."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not size.tiny:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        work()
        settle(size)
    if trace:
        recorded.export_chrome_trace(trace)
    averages = recorded.key_averages()
    calls = {event.key: event.count for event in averages}
    longest = sorted(averages, key=_device_us, reverse=True)[:15]
    return Profile(
        launches=sum(calls.get(name, 0) for name in LAUNCHES),
        waits=sum(calls.get(name, 0) for name in WAITS),
        copies_to_host=sum(count for name, count in calls.items() if name.startswith("Memcpy DtoH")),
        kernels=tuple((event.key[:90], round(_device_us(event) / 1000, 3)) for event in longest if _device_us(event)),
    )


def _device_us(event: Any) -> float:
    return float(event.self_device_time_total)


def product_tflops(size: Size, side: int = 8192) -> float:
    """Rate of a square bfloat16 product, in TFLOP/s."""
    side = size.of(side, 64)
    left, right = (torch.randn(side, side, device=size.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(size, lambda: left @ right, turns=10, warm_up=3) / 1e12


def datasheet_tflops() -> float | None:
    """The card's dense bfloat16 rate by its datasheet; None for a card that is not listed, or none."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((rate for part, rate in DATASHEET_BF16_TFLOPS.items() if part in name), None)
