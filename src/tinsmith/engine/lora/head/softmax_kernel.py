"""`softmax.softmax_of_rows` as a Triton kernel: a program for each row, which reads its logits once for the sums, and
once more if it writes probabilities. In float32 these overwrite the logits."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tinsmith.engine.lora.head.softmax import SoftmaxRows

BLOCK = 4096
"""Columns that a program reads at a time; each of them has sums of its own until the end of the row."""
WARPS = 8


def softmax_of_rows(logits: Tensor, *, entropies: bool, probs: torch.dtype | None) -> SoftmaxRows:
    """See `softmax.SoftmaxOfRows`."""
    rows, columns = logits.shape
    sums, entropy = logits.new_empty(2, rows)
    written = None
    if probs is not None:
        written = logits if probs == logits.dtype else torch.empty_like(logits, dtype=probs)
    into = logits if written is None else written
    settings = {"COLUMNS": columns, "WRITES": written is not None, "BLOCK": BLOCK, "num_warps": WARPS}
    kernel[(rows,)](logits, into, sums, entropy, **settings)  # pyright: ignore[reportIndexIssue]
    return SoftmaxRows(sums, entropy if entropies else None, written)


@triton.jit
def kernel(logits, probs, log_sums, entropies, COLUMNS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    """A row: log sum(exp(logit)), its entropy and, if it `WRITES`, its probabilities."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * COLUMNS
    at = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -3e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum of exp(logit - top)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of exp(logit - top) (logit - top)
    for first in range(0, COLUMNS, BLOCK):
        values = tl.load(logits + first + at, mask=first + at < COLUMNS, other=float("-inf"))
        new_top = tl.maximum(top, values)
        moved = top - new_top
        factor = tl.exp(moved)
        gap = values - new_top
        term = tl.exp(gap)
        weighted = factor * (weighted + moved * total) + term * tl.maximum(gap, -1e4)  # 0 for -inf
        total = factor * total + term
        top = new_top
    row_top = tl.max(top, 0)
    moved = top - row_top
    factor = tl.exp(moved)
    row_weighted = tl.sum(factor * (weighted + moved * total), 0)
    row_total = tl.sum(factor * total, 0)
    log_sum = tl.log(row_total)
    tl.store(log_sums + row, row_top + log_sum)
    tl.store(entropies + row, log_sum - row_weighted / row_total)
    if WRITES:
        probs += row * COLUMNS
        for first in range(0, COLUMNS, BLOCK):
            inside = first + at < COLUMNS
            values = tl.load(logits + first + at, mask=inside)
            tl.store(probs + first + at, tl.exp(values - row_top) / row_total, mask=inside)
