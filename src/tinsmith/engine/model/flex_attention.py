"""Attention over a packed tree in one call on a GPU: PyTorch's FlexAttention with the tree as its block mask.

Packed positions number the tree's nodes in depth-first order, so everything that branches off a position directly
follows it: query i sees key j exactly if j <= i < until[j]. The kernel skips blocks of the mask in which nothing is
visible and applies no mask in blocks in which everything is. It is compiled when the model is loaded, where
`self_check` computes with it on the model's own heads. Not for CPUs, where FlexAttention has no backward.

Where part of the tree is cached (`CachedKV`), the queries are the other positions, and the keys those of both. Each
layer's cached keys that any query sees are gathered in front of its new ones, whatever their number of prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from tinsmith.engine.model.architectures.latents import Latents, to_cache
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import PackedTree
from tinsmith.engine.triton_support import runs_triton

BLOCK = 128
"""Queries and keys in a block of the mask."""
MIN_COMPUTE_CAPABILITY = (8, 0)
"""Ampere, the first with bfloat16."""
KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""The main kernel for all lengths. For short ones torch would take its kernel for decoding, which does not compile for
4 or 8 query heads a key head with blocks of 128, and which would be another variant."""
MAX_VARIANTS = 64
"""Compiled variants of the kernel in a process. A model makes 7 for each of its windows (1 token, up to a block, more;
with gradients and without; one after cached prefixes), and one or two for its self-check. A call that needs one more
than these fails: torch would compute it uncompiled, with the whole matrix of scores in memory."""


def is_supported(device: torch.device) -> bool:
    """Whether the kernel supports this device; `self_check` computes whether it compiles for a model."""
    return runs_triton(device) and torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY


@dataclass(frozen=True, slots=True)
class CachedKV:
    """Packed positions whose keys and values are cached, so that a pass computes the others only."""

    positions: np.ndarray
    """int64 [P], rising."""
    read: Callable[[np.ndarray], Sequence[tuple[Tensor, Tensor]]]
    """Keys and values [layers, Hkv, N, D] of some of the positions in order, run by run."""


@dataclass(frozen=True, slots=True)
class _Visible:
    """What the layers with one window read: the mask, and each run of cached keys and values [Hkv, N, D] by layer.

    Results are contiguous, because the compiler makes a variant for each order of strides.
    """

    mask: BlockMask
    keys: Sequence[tuple[Tensor, ...]] = ()
    values: Sequence[tuple[Tensor, ...]] = ()

    def padded(self, query: Tensor) -> Tensor:
        """The queries, as many as the mask has."""
        missing = self.mask.shape[-2] - query.shape[2]
        return pad(query, (0, 0, 0, missing)) if missing else query.contiguous()

    def joined(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's cached keys and values in front of those of the pass, as many as the mask has."""
        missing = self.mask.shape[-1] - key.shape[2] - sum(run[layer].shape[1] for run in self.keys)
        pairs = []
        for runs, new in ((self.keys, key), (self.values, value)):
            parts = [*(run[layer] for run in runs), new[0]]
            if missing:
                parts.append(new.new_zeros(new.shape[1], missing, new.shape[3]))
            pairs.append(torch.cat(parts, dim=1)[None])
        return pairs[0], pairs[1]


@dataclass(slots=True)
class FlexAttention:
    """Attention over a packed tree, or of the positions of it that are not `cached`. With `save_kv`, `saved_kv` has the
    keys and values [1, Hkv, T, D] of each layer's computed positions."""

    tree: PackedTree
    device: torch.device
    save_kv: bool = False
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    cached: CachedKV | None = None
    cached_queries: int = 0
    _visible: dict[int | None, _Visible] = field(default_factory=dict)
    """By window: layers with the same window share the mask."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `attention.AttentionContext.attend`."""
        if self.save_kv:
            self.saved_kv.append(to_cache(key, value, latents))
        visible = self._in_window(rule.window)
        if self.cached is None:
            return _attend(query, key, value, visible.mask, rule).transpose(1, 2)
        keys, values = visible.joined(layer, key, value)
        output = _attend(visible.padded(query), keys, values, visible.mask, rule)
        return output[:, :, : query.shape[2]].transpose(1, 2)

    def _in_window(self, window: int | None) -> _Visible:
        if window not in self._visible:
            self._visible[window] = (
                _Visible(block_mask(self.tree, self.device, window))
                if self.cached is None
                else _after_cached(self.cached, self.tree, self.device, window)
            )
        return self._visible[window]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, rule: AttentionRule) -> Tensor:
    """query [1, Hq, Q, D], key and value [1, Hkv, K, D] -> [1, Hq, Q, D]."""
    call = flex_attention if query.device.type == "cpu" else _compiled()
    settings: dict[str, Any] = {"block_mask": mask, "scale": rule.scale, "enable_gqa": True}
    settings["kernel_options"] = KERNEL_OPTIONS
    if rule.softcap is not None:
        settings["score_mod"] = _capped(rule.softcap)
    if rule.sinks is None:
        return call(query, key, value, **settings)  # type: ignore[no-any-return]
    output, auxiliary = call(query, key, value, return_aux=AuxRequest(lse=True), **settings)
    assert auxiliary.lse is not None
    share = torch.sigmoid(auxiliary.lse - rule.sinks.to(auxiliary.lse.dtype)[:, None])
    return (output * share[..., None]).to(output.dtype)  # type: ignore[no-any-return]


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
    until, every = visible_until(tree), np.arange(len(tree.tokens))
    until_on_device = torch.as_tensor(until, dtype=torch.int32, device=device)
    depths = torch.as_tensor(tree.positions, dtype=torch.int32, device=device)
    width = len(until) if window is None else window

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until_on_device[key])

    def visible_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (depths[query] - depths[key] < width)

    blocks = _blocks(every, every, until)
    if window is not None:
        blocks = _blocks_in_window(*blocks, tree.positions, tree.positions, window)
    return _listed_mask(*blocks, visible if window is None else visible_in_window, (len(until), len(until)), device)


def _after_cached(cached: CachedKV, tree: PackedTree, device: torch.device, window: int | None) -> _Visible:
    """The mask of the positions that are not cached over the cached ones that they see, followed by themselves.

    Both are at least one more than a block, so that one variant of the kernel serves all lengths: further queries are
    copies of the last, and no query sees the further keys.
    """
    is_cached = np.zeros(len(tree.tokens), bool)
    is_cached[cached.positions] = True
    queries, read = np.flatnonzero(~is_cached), _seen(tree, is_cached, window)
    keys = np.concatenate([read, queries])
    until = _at_least(visible_until(tree)[keys], 0)
    queries, keys = _at_least(queries, queries[-1]), _at_least(keys, keys[-1])
    query_depths, key_depths = tree.positions[queries], tree.positions[keys]
    query_at, key_at, seen_until, query_depth, key_depth = (
        torch.as_tensor(array, dtype=torch.int32, device=device)
        for array in (queries, keys, until, query_depths, key_depths)
    )
    width = len(is_cached) if window is None else window

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key_at[key] <= query_at[query]) & (query_at[query] < seen_until[key])

    def visible_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (query_depth[query] - key_depth[key] < width)

    blocks = _blocks(queries, keys, until)
    if window is not None:
        blocks = _blocks_in_window(*blocks, query_depths, key_depths, window)
    mask = _listed_mask(*blocks, visible if window is None else visible_in_window, (len(queries), len(keys)), device)
    runs = cached.read(read) if read.size else ()
    return _Visible(mask, [keys.unbind() for keys, _ in runs], [values.unbind() for _, values in runs])


def _seen(tree: PackedTree, is_cached: np.ndarray, window: int | None) -> np.ndarray:
    """The cached positions, rising, that any position that is not cached sees."""
    total = len(is_cached)
    seen = np.zeros(total, bool)
    for path in tree.index.values():
        depths, computed = np.arange(len(path)), np.flatnonzero(~is_cached[path])
        next_computed = np.append(computed, 2 * total)[np.searchsorted(computed, depths)]
        seen[path] |= next_computed - depths < min(window or total, total)
    return np.flatnonzero(seen & is_cached)


def _at_least(array: np.ndarray, filler: int) -> np.ndarray:
    """The array, filled up to one element more than a block."""
    return np.pad(array, (0, max(0, BLOCK + 1 - len(array))), constant_values=filler)


def visible_until(tree: PackedTree) -> np.ndarray:
    """int64 [T]: one past the last packed position that sees each position."""
    until = np.zeros(len(tree.tokens), np.int64)
    for path in tree.index.values():
        if path.size:
            until[path] = np.maximum(until[path], path[-1] + 1)
    return until


def _blocks(queries: np.ndarray, keys: np.ndarray, until: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [query blocks, key blocks]: partial blocks (some queries may see some keys) and full blocks (all see all).

    `queries` and `keys` are packed positions; those up to `until` see a key.
    """
    (first_query, last_query), (first_key, last_key) = _extremes(queries), _extremes(keys)
    nearest, furthest = _extremes(until)
    full = (last_key <= first_query[:, None]) & (last_query[:, None] < nearest)
    some = (first_key <= last_query[:, None]) & (first_query[:, None] < furthest)
    return some & ~full, full


def _blocks_in_window(
    partial: np.ndarray, full: np.ndarray, query_depths: np.ndarray, key_depths: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of which something is left within the window; full ones only if everything is."""
    (least_query, most_query), (least_key, most_key) = _extremes(query_depths), _extremes(key_depths)
    some = least_query[:, None] - most_key < window
    whole = full & (most_query[:, None] - least_key < window)
    return (partial | full) & some & ~whole, whole


def _extremes(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest element of each block."""
    starts = np.arange(0, len(array), BLOCK)
    return np.minimum.reduceat(array, starts), np.maximum.reduceat(array, starts)


def _listed_mask(
    partial: np.ndarray,
    full: np.ndarray,
    visible: Callable[..., Tensor],
    lengths: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=lengths,
    )


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
    torch._dynamo.config.specialize_float = True  # a soft cap is a constant: as an input, the kernel does not lower
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
