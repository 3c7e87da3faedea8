"""Attention over a packed tree in one call, on a GPU: PyTorch's FlexAttention with the tree as its mask.

Packed positions number the tree's nodes in depth-first order, so what branches off a position stands in one stretch
after it: a query i sees a key j just if j <= i < ends[j]. With that rule the kernel skips blocks in which nothing is
seen and masks none in which all is; shared prefixes add up in its own backward. The kernel is compiled once, at load.

Left out: CPUs, where PyTorch has no backward for it, and float32, where `attention` masks each job by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tinsmith.engine.model.packing import PackedRow, PackedTree, pack

log = logging.getLogger(__name__)

BLOCK = 128
"""Queries and keys of a block of the mask: what the kernel takes at a time."""
OLDEST = (8, 0)
"""Compute capability of Ampere, the first with bfloat16."""


@cache
def is_supported(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is for tensors of this kind, and can be compiled here: found out by doing it, once."""
    if device.type != "cuda" or dtype == torch.float32 or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        _try(dtype, device)
    except Exception:
        log.warning("FlexAttention cannot be compiled here; attention is slower without it.", exc_info=True)
        return False
    return True


@dataclass(slots=True)
class FlexAttention:
    """The attention context of a pass. With `keep`, keys and values stay: [1, Hkv, T, D] for each layer, in order."""

    mask: BlockMask
    keep: bool = False
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
        if self.keep:
            self.kept.append((key, value))
        call = flex_attention if query.device.type == "cpu" else _compiled()
        output = call(query, key, value, block_mask=self.mask, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)


def packed_attention(tree: PackedTree, device: torch.device, keep: bool = False) -> FlexAttention:
    """The context of a pass over `tree`; its mask serves every layer."""
    return FlexAttention(block_mask(tree, device), keep)


def block_mask(tree: PackedTree, device: torch.device) -> BlockMask:
    """The tree's mask, and which of its blocks are full, partly seen or empty."""
    ends = visible_until(tree)
    partly, full = _blocks(ends)
    visible = torch.as_tensor(ends, dtype=torch.int32, device=device)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < visible[key])

    return BlockMask.from_kv_blocks(
        *_listed(partly, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(len(ends), len(ends)),
    )


def visible_until(tree: PackedTree) -> np.ndarray:
    """int64 [T]: one past the last packed position that sees each."""
    ends = np.zeros(len(tree.tokens), np.int64)
    for path in tree.index.values():
        if path.size:
            ends[path] = np.maximum(ends[path], path[-1] + 1)
    return ends


def _blocks(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [blocks of queries, blocks of keys] twice: where some keys are seen by some queries, where all by all."""
    starts = np.arange(0, len(ends), BLOCK)
    lasts = np.minimum(starts + BLOCK, len(ends)) - 1
    furthest, nearest = np.maximum.reduceat(ends, starts), np.minimum.reduceat(ends, starts)
    before = starts[:, None] > starts[None, :]
    full = before & (lasts[:, None] < nearest[None, :])
    some = (before & (starts[:, None] < furthest[None, :])) | np.eye(len(starts), dtype=bool)
    return some & ~full, full


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many of each row are set, int32 [1, 1, rows], and which, first, int32 [1, 1, rows, columns]."""
    counts = blocks.sum(1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.as_tensor(counts, device=device)[None, None], torch.as_tensor(order, device=device)[None, None]


def _try(dtype: torch.dtype, device: torch.device) -> None:
    """Forward and backward at two lengths: a compiler may take the first one as fixed."""
    for length in (BLOCK + 9, 3 * BLOCK):
        row = PackedRow(key=0, adapter=0, tokens=np.arange(length, dtype=np.int32))
        query, key, value = (
            torch.randn((1, heads, length, 64), dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2)
        )
        packed_attention(pack([row]), device).attend(0, query, key, value, 0.125).sum().backward()


@cache
def _compiled() -> Callable[..., Any]:
    """For every length of a pass at once; compiling takes seconds, so `models.load` asks for it first."""
    return torch.compile(flex_attention, dynamic=True)
