"""Attention over a packed tree in one call on a GPU: PyTorch's FlexAttention with the tree as its block mask.

Packed positions number the tree's nodes in depth-first order, so everything that branches off a position directly
follows it: query i sees key j exactly if j <= i < until[j]. The kernel skips blocks of the mask in which nothing is
visible and applies no mask in blocks in which everything is. It is compiled when the model is loaded, where
`self_check` computes with it on the model's own heads. Not for CPUs, where FlexAttention has no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tinsmith.engine.model.architectures.latents import Latents, to_cache
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import PackedTree

BLOCK = 128
"""Queries and keys in a block of the mask."""
MIN_COMPUTE_CAPABILITY = (8, 0)
"""Ampere, the first with bfloat16."""
KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""The main kernel for all lengths. For short ones torch would take its kernel for decoding, which does not compile for
4 or 8 query heads a key head with blocks of 128, and which would be another variant."""
MAX_VARIANTS = 64
"""Compiled variants of the kernel in a process. A model makes 6 for each of its windows (1 token, up to a block, more;
with gradients and without), and one or two for its self-check. A call that needs one more than these fails: torch would
compute it uncompiled, with the whole matrix of scores in memory."""


def is_supported(device: torch.device) -> bool:
    """Whether the kernel supports this device; `self_check` computes whether it compiles for a model."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY


@dataclass(slots=True)
class FlexAttention:
    """Attention over a packed tree. With `save_kv`, `saved_kv` has the keys and values [1, Hkv, T, D] of each layer."""

    tree: PackedTree
    device: torch.device
    save_kv: bool = False
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """Masks by window."""
    cached_queries: int = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `attention.AttentionContext.attend`."""
        if self.save_kv:
            self.saved_kv.append(to_cache(key, value, latents))
        if rule.window not in self.masks:
            self.masks[rule.window] = block_mask(self.tree, self.device, rule.window)
        call = flex_attention if query.device.type == "cpu" else _compiled()
        settings: dict[str, Any] = {"block_mask": self.masks[rule.window], "scale": rule.scale, "enable_gqa": True}
        settings["kernel_options"] = KERNEL_OPTIONS
        if rule.softcap is not None:
            settings["score_mod"] = _capped(rule.softcap)
        if rule.sinks is None:
            return call(query, key, value, **settings).transpose(1, 2)
        output, auxiliary = call(query, key, value, return_aux=AuxRequest(lse=True), **settings)
        assert auxiliary.lse is not None
        share = torch.sigmoid(auxiliary.lse - rule.sinks.to(auxiliary.lse.dtype)[:, None])
        return (output * share[..., None]).to(output.dtype).transpose(1, 2)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """The modification of scores by a soft cap; one for each, so that it is compiled once."""

    def cap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def packed_attention(tree: PackedTree, device: torch.device, save_kv: bool = False) -> FlexAttention:
    """Attention over `tree`. A mask is computed once for all layers of a window."""
    return FlexAttention(tree, device, save_kv)


def block_mask(tree: PackedTree, device: torch.device, window: int | None = None) -> BlockMask:
    """The tree's mask, with its full and partial blocks. With a window, a query sees the keys that are fewer than
    `window` positions before it on its path."""
    until = visible_until(tree)
    partial, full = _blocks(until)
    until_on_device = torch.as_tensor(until, dtype=torch.int32, device=device)
    depths = torch.as_tensor(tree.positions, dtype=torch.int32, device=device)
    width = len(until) if window is None else window
    if window is not None:
        partial, full = _blocks_in_window(partial, full, tree.positions, window)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until_on_device[key])

    def visible_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (depths[query] - depths[key] < width)

    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible if window is None else visible_in_window,
        seq_lengths=(len(until), len(until)),
    )


def visible_until(tree: PackedTree) -> np.ndarray:
    """int64 [T]: one past the last packed position that sees each position."""
    until = np.zeros(len(tree.tokens), np.int64)
    for path in tree.index.values():
        if path.size:
            until[path] = np.maximum(until[path], path[-1] + 1)
    return until


def _blocks(until: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [query blocks, key blocks]: partial blocks (some queries see some keys) and full blocks (all see all)."""
    starts = np.arange(0, len(until), BLOCK)
    lasts = np.minimum(starts + BLOCK, len(until)) - 1
    furthest, nearest = np.maximum.reduceat(until, starts), np.minimum.reduceat(until, starts)
    before = starts[:, None] > starts[None, :]
    full = before & (lasts[:, None] < nearest[None, :])
    some = (before & (starts[:, None] < furthest[None, :])) | np.eye(len(starts), dtype=bool)
    return some & ~full, full


def _blocks_in_window(
    partial: np.ndarray, full: np.ndarray, depths: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of which something is left within the window; full ones only if everything is."""
    starts = np.arange(0, len(depths), BLOCK)
    least, most = np.minimum.reduceat(depths, starts), np.maximum.reduceat(depths, starts)
    some = least[:, None] - most[None, :] < window
    whole = full & (most[:, None] - least[None, :] < window)
    return (partial | full) & some & ~whole, whole


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of set columns of each row, int32 [1, 1, rows], and their indices first, int32 [1, 1, rows, columns]."""
    counts = blocks.sum(1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.as_tensor(counts, device=device)[None, None], torch.as_tensor(order, device=device)[None, None]


@cache
def _compiled(backend: str = "inductor") -> Callable[..., Any]:
    """The compiled kernel for all lengths."""
    torch._dynamo.config.recompile_limit = MAX_VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    kernel: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, backend=backend)

    def call(*tensors: Tensor, **settings: Any) -> Any:
        """The kernel is deterministic in any mode. Each mode would compile variants of its own, so it gets one."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        if not deterministic:
            return kernel(*tensors, **settings)
        torch.use_deterministic_algorithms(False)
        try:
            return kernel(*tensors, **settings)
        finally:
            torch.use_deterministic_algorithms(True)

    return call
