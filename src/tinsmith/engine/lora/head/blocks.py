"""Which positions and targets are scored in which block of logits: planned on the host, with one copy to a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import PlacedAdapter

CPU_ROWS = 160
"""Rows of logits in a block on a CPU: 31 MB for a vocabulary of 49,152, which stays in its cache."""
GPU_BYTES = 512 << 20
"""Logits in a block on a GPU, which reads the output weights once for each block."""
MIN_GPU_ROWS = 1024
"""Rows in a block on a GPU, however many bytes these are."""


@dataclass(frozen=True, slots=True)
class PackedTargets:
    """M targets, each at a packed position, in any order."""

    at: np.ndarray
    """int64 [M]."""
    ids: np.ndarray
    """int64 [M]."""


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """Packed positions whose logits are computed together, and their targets."""

    positions: Tensor
    """int64 [R], rising."""
    has_grad: bool
    placed: tuple[PlacedAdapter, ...]
    """The adapters of these positions, placed by index in `positions`."""
    rows: Tensor
    """int64 [N]: the index in `positions` of each target, rising."""
    ids: Tensor
    """int64 [N]."""
    numbers: Tensor
    """int64 [N]: the index of each target among the packed targets."""


def block_rows(vocabulary: int, device: torch.device) -> int:
    """The most rows in a block of logits."""
    if device.type == "cpu":
        return CPU_ROWS
    return max(MIN_GPU_ROWS, GPU_BYTES // (4 * vocabulary))


def plan_blocks(
    length: int,
    placed: Sequence[PlacedAdapter],
    targets: PackedTargets,
    grad_mask: np.ndarray | None,
    most_rows: int,
    device: torch.device,
) -> list[ScoreBlock]:
    """The blocks of `length` positions that have targets. Those with a gradient (bool [T]) come first, because they are
    in blocks of their own."""
    parts = list(_parts(np.zeros(length, bool) if grad_mask is None else grad_mask, most_rows))
    positions = np.concatenate([part for part, _ in parts])
    place = np.empty_like(positions)
    place[positions] = np.arange(length)
    order = np.argsort(place[targets.at], kind="stable")
    at = place[targets.at[order]]
    starts = np.cumsum([0, *(len(part) for part, _ in parts)])
    bounds = np.searchsorted(at, starts)
    rows = at - np.repeat(starts[:-1], np.diff(bounds))
    uploaded = _upload(np.concatenate([positions, rows, targets.ids[order], order]), device)
    on_device = uploaded.split([length, len(order), len(order), len(order)])
    blocks = []
    for number, (part, has_grad) in enumerate(parts):
        within, of_targets = slice(*starts[number : number + 2]), slice(*bounds[number : number + 2])
        if of_targets.start < of_targets.stop:
            indices = [values[of_targets] for values in on_device[1:]]
            blocks.append(ScoreBlock(on_device[0][within], has_grad, _among(placed, part), *indices))
    return blocks


def _parts(mask: np.ndarray, most_rows: int) -> Iterator[tuple[np.ndarray, bool]]:
    """The positions in blocks of nearly equal size, rising, and whether they have a gradient."""
    for has_grad in (True, False):
        positions = np.flatnonzero(mask == has_grad)
        if len(positions):
            blocks = np.array_split(positions, -(-len(positions) // most_rows))
            yield from ((block, has_grad) for block in blocks)


def _among(placed: Sequence[PlacedAdapter], positions: np.ndarray) -> tuple[PlacedAdapter, ...]:
    """The adapters of some positions (rising), placed by index in `positions`."""
    edges = np.array([(start, stop) for _, start, stop in placed], np.int64).reshape(-1, 2)
    ranges = zip(placed, np.searchsorted(positions, edges).tolist(), strict=True)
    return tuple((weights, low, high) for (weights, _, _), (low, high) in ranges if low < high)


def _upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device. A GPU copies from page-locked memory, for which nothing waits."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
