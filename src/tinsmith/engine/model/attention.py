"""The attention function that transformers calls, and attention over a packed tree.

`register` makes one attention function known to transformers. Which attention it computes travels with each call as
`context`: `packed_attention` over the packed tree of a pass, or the sampler's over its KV cache.

The rows of a packed pass are one sequence without padding. Each job of the tree is one or more kernel calls over the
runs of its shared prefix and its own positions. On a GPU one FlexAttention call does the whole tree (`flex_attention`)
where that is supported, else `scaled_dot_product_attention`. On a CPU the kernel is PyTorch's flash attention, forward
and backward called directly, so that gradients of a shared prefix accumulate in place.

Where Numba is installed, one compiled function computes all calls of a layer instead (`cpu.calls`). It is faster, and
saves nothing for the backward but its inputs. Soft caps and sinks are not built into it.

Without them, CPUs compute bfloat16 attention as batched matrix products (`batched_attention`), with the query heads
that share a key head folded into the rows: the flash kernel's backward is slow there. The matrices of probabilities
[Hkv, G Q, K] are computed again for the backward, so that memory grows linearly with the length of a row.

A piece of a tree (`packing.cut`) also sees saved keys and values of its path. Its backward adds their
gradients to those saved, and takes from these what later pieces have added to its own.

Layers may differ in their rule: window, soft cap, sinks (`attention_kernels`). A window is a mask over depths along
each row's path; keys that no query of a call sees are left out, so a long row costs its length times the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from typing_extensions import override

from tinsmith.engine.cpu.calls import AttentionCall, CompiledCalls, KeyRun
from tinsmith.engine.model import flex_attention
from tinsmith.engine.model.architectures.latents import Latents, to_cache
from tinsmith.engine.model.attention_kernels import (
    additive_mask,
    attend,
    batched_attention,
    batched_attention_backward,
    equal_widths,
    flash_attention,
    flash_attention_backward,
    needs_products,
)
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import AttentionJob, PackedTree, Piece
from tinsmith.errors import Unsupported

NAME = "tinsmith"
"""Of the attention function among those of transformers."""
CALL_QUERIES = 128
"""Queries of one call of `batched_attention` or of a compiled function: their scores stay in the CPU's cache."""
MASKED_CALL_QUERIES = 256
"""Queries of one call with a mask on a CPU. The kernel also computes what the mask removes, so a job is split: keys
after a call's last query are left out."""
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "past_key_values", "output_attentions",
             "output_hidden_states", "return_dict", "is_causal", "position_embeddings"}  # fmt: skip
"""Keywords of transformers' attention modules that change nothing here."""
Calls = Sequence["KernelCall"] | CompiledCalls
"""The calls of a layer."""


class AttentionContext(Protocol):
    """Attention of one forward pass: which keys each query sees."""

    @property
    def cached_queries(self) -> int:
        """About how many queries attend to each cached token; 0 if nothing is cached."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].

        `latents` is what a cache keeps of the tokens, if not keys and values.
        """
        ...


def register() -> str:
    """Register the attention function with transformers; returns the name to pass as attn_implementation."""
    AttentionInterface.register(NAME, _attention)
    return NAME


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    context: AttentionContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if unknown := sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS):
        raise Unsupported(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which would be ignored.",
            "Serve a model with another kind of attention.",
        )
    rule = AttentionRule(scaling, sliding_window, softcap, None if s_aux is None else s_aux.detach())
    if latent_attention := vars(module).get("latent_attention"):
        return latent_attention.attend(context, query, key, value, rule), None
    return context.attend(int(module.layer_idx), query, key, value, rule), None  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of PyTorch's kernel, or of `batched_attention`."""

    call: AttentionCall
    mask: Tensor | None
    """For an attention kernel: additive [Q, P + Q]; None if every query sees the whole prefix and its own past."""
    batched_mask: Tensor | None
    """For `batched_attention`, which computes the call if this is given: additive [Q, M], for the last M keys."""


@dataclass(frozen=True, slots=True)
class PathKV:
    """Keys and values of the path of a tree's piece, by layer, and their gradients from later pieces.

    Pieces are computed from the last to the first. Once one is computed, only the positions on its path have a gradient
    that is still to be used, so only these gradients are kept.
    """

    size: int
    """Length S of the longest path."""
    tensors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """[1, Hkv, S, D]."""
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """float32 [1, Hkv, S, D], of keys and values on the path of the piece that was computed last."""


@dataclass(frozen=True, slots=True)
class PieceKV:
    """What a piece sees of the positions before it."""

    saved: PathKV
    piece: Piece

    def layer(self, layer: int, key: Tensor, value: Tensor) -> PieceLayerKV:
        """The same of one layer, with its own keys and values."""
        tensors, past = self.saved.tensors, self.piece.past
        if layer not in tensors:
            shapes = [(1, tensor.shape[1], self.saved.size, tensor.shape[3]) for tensor in (key, value)]
            tensors[layer] = key.new_empty(shapes[0]), value.new_empty(shapes[1])
        if self.piece.saves:
            for saved, own in zip(tensors[layer], (key, value), strict=True):
                saved[:, :, past : past + own.shape[2]] = own.detach()
        return PieceLayerKV(self, layer)


@dataclass(frozen=True, slots=True)
class PieceLayerKV:
    """The keys and values of a layer before a piece."""

    before: PieceKV
    layer: int

    def joined(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All that the piece sees: what is before it, then its own."""
        keys, values = (tensor[:, :, : self.before.piece.past] for tensor in self.before.saved.tensors[self.layer])
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)

    def exchange(self, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Given the float32 gradients of all that `joined` returned, keep those of what is before the piece, and return
        those of its own, both with what later pieces have kept for them."""
        piece, grads = self.before.piece, self.before.saved.grads
        past, ancestors = piece.past, torch.from_numpy(piece.ancestors)
        if self.layer in grads:
            for new, later in zip((key_grad, value_grad), grads[self.layer], strict=True):
                shared = later.shape[2] - len(ancestors)
                new[:, :, :shared] += later[:, :, :shared]
                new[:, :, past:].index_add_(2, ancestors, later[:, :, shared:])
        grads[self.layer] = key_grad[:, :, :past].clone(), value_grad[:, :, :past].clone()
        return key_grad[:, :, past:], value_grad[:, :, past:]


@dataclass(slots=True)
class PackedAttention:
    """Attention over a packed tree, job by job."""

    tree: PackedTree
    dtype: torch.dtype
    device: torch.device
    save_kv: bool = False
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values [1, Hkv, T, D] of each layer, if `save_kv`, as `to_cache` gives them."""
    before: PieceKV | None = None
    """Keys and values before the tree's positions, if these are a piece of a larger tree."""
    compiled: bool = False
    """Whether compiled functions compute what they can, on a CPU."""
    _calls: dict[tuple[int | None, str], Calls] = field(default_factory=dict)
    """By window and what computes them: layers with the same rule share the masks."""
    cached_queries: int = 0

    def calls(self, rule: AttentionRule) -> Calls:
        """The calls of a layer with this rule."""
        cpu = self.device.type == "cpu"
        form = "kernel"
        if self.compiled and cpu and rule.is_softmax:
            form = "compiled"
        elif (cpu and self.dtype == torch.bfloat16) or needs_products(rule, self.device):
            form = "products"
        if (rule.window, form) not in self._calls:
            by_kernel = form == "kernel"
            calls = [call for job in self.tree.jobs for call in self._job_calls(job, rule.window, by_kernel)]
            if form == "compiled":
                self._calls[rule.window, form] = CompiledCalls.of(calls)
            else:
                self._calls[rule.window, form] = [self._kernel_call(call, by_kernel) for call in calls]
        return self._calls[rule.window, form]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `AttentionContext.attend`."""
        if self.save_kv:
            self.saved_kv.append(to_cache(key, value, latents))
        calls, width = self.calls(rule), value.shape[3]
        if not isinstance(calls, CompiledCalls):
            query, key, value = equal_widths(query, key, value)
        before = None if self.before is None else self.before.layer(layer, key, value)
        if isinstance(calls, CompiledCalls):
            output = _CompiledAttention.apply(query, key, value, calls, rule.scale, before)
        elif torch.is_grad_enabled():
            output = _PackedAttention.apply(query, key, value, calls, rule, before)
        else:
            output = _packed_forward(query, *_joined(key, value, before), calls, rule)[0]
        return output.transpose(1, 2)[..., :width]  # type: ignore[no-any-return]

    def _job_calls(self, job: AttentionJob, window: int | None, by_kernel: bool) -> Iterator[AttentionCall]:
        """A job split by queries. A call's keys are the job's prefix and the queries up to its last, so that less is
        masked."""
        total = job.stop - job.start
        depth = 0 if job.mask is None else job.mask.shape[1] - total
        split = (self.device.type == "cpu" and job.mask is not None) or (window is not None and depth + total > window)
        step = CALL_QUERIES if not by_kernel else MASKED_CALL_QUERIES if split else total
        for first in range(0, total, step):
            last = min(first + step, total)
            visible = None if job.mask is None else job.mask[first:last, : depth + last]
            runs = (*job.prefix, (job.start, job.start + last))
            if window is not None and depth + last > window:
                visible, skipped = self._windowed(job, first, last, visible, window)
                runs = after(runs, skipped)
            keys = tuple(KeyRun(start, stop) for start, stop in runs)
            past = 0 if self.before is None else self.before.piece.past
            start = job.start - past
            yield AttentionCall(start + first, start + last, keys, visible)

    def _kernel_call(self, call: AttentionCall, by_kernel: bool) -> KernelCall:
        """A call with its mask."""
        visible, queries, keys = call.visible, call.stop - call.start, call.keys
        if visible is None and not by_kernel:
            visible = np.tri(queries, dtype=bool)
        elif visible is None and queries < keys:
            visible = np.tri(queries, keys, keys - queries, dtype=bool)
        mask = None if visible is None else additive_mask(visible, self.dtype, self.device)
        return KernelCall(call, mask, None) if by_kernel else KernelCall(call, None, mask)

    def _windowed(
        self, job: AttentionJob, first: int, last: int, visible: np.ndarray | None, window: int
    ) -> tuple[np.ndarray, int]:
        """What the job's queries first..last see within the window, and the number of leading keys that none sees."""
        past = 0 if self.before is None else self.before.piece.past
        own = self.tree.positions[job.start - past : job.stop - past]
        depth = 0 if job.mask is None else job.mask.shape[1] - len(own)
        key_depths = np.concatenate([np.arange(depth), own[:last]])
        # Only keys before the first query can be out of every query's window.
        skipped = min(int(np.argmax(key_depths > own[first:last].min() - window)), depth + first)
        near = own[first:last, None] - key_depths[None, skipped:] < window
        seen = np.tri(last - first, last, first, dtype=bool) if visible is None else visible
        return seen[:, skipped:] & near, skipped


def packed_attention(
    tree: PackedTree,
    dtype: torch.dtype,
    device: torch.device,
    save_kv: bool = False,
    *,
    flex: bool = False,
    compiled: bool = False,
) -> PackedAttention | flex_attention.FlexAttention:
    """Attention over `tree`, by FlexAttention, compiled functions or job by job. Masks are computed once for all layers
    of a rule.

    With `save_kv`, the keys and values of each layer are collected for the KV cache.
    """
    if flex:
        return flex_attention.packed_attention(tree, device, save_kv)
    return PackedAttention(tree, dtype, device, save_kv, compiled=compiled)


def after(runs: tuple[tuple[int, int], ...], skipped: int) -> tuple[tuple[int, int], ...]:
    """Runs (start, stop) without their first `skipped` positions."""
    left: list[tuple[int, int]] = []
    for start, stop in runs:
        cut = min(skipped, stop - start)
        skipped -= cut
        if start + cut < stop:
            left.append((start + cut, stop))
    return tuple(left)


def _visible(tensor: Tensor, call: AttentionCall) -> Tensor:
    """The keys (or values) of a call."""
    if all(left.stop == right.start for left, right in pairwise(call.runs)):
        return tensor[:, :, call.runs[0].start : call.runs[-1].stop]
    return torch.cat([tensor[:, :, run.start : run.stop] for run in call.runs], dim=2)


def _joined(key: Tensor, value: Tensor, before: PieceLayerKV | None) -> tuple[Tensor, Tensor]:
    """All keys and values that the queries may see."""
    return (key, value) if before is None else before.joined(key, value)


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[KernelCall], rule: AttentionRule
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the logsumexp of each call of the flash kernel, which its backward needs."""
    # [1, T, Hq, D] in memory, so that the output projection reads it without a copy.
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    saved: list[Tensor] = []
    for each in calls:
        queries = slice(each.call.start, each.call.stop)
        own, keys, values = query[:, :, queries], _visible(key, each.call), _visible(value, each.call)
        if each.batched_mask is not None:
            result = batched_attention(own, keys, values, each.batched_mask, rule)
        elif query.device.type == "cpu":
            result, logsumexp = flash_attention(own, keys, values, each.mask, rule)
            saved.append(logsumexp)
        else:
            result = attend(own, keys, values, each.mask, rule)
        output[:, :, queries] = result
    return output, saved


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: Sequence[KernelCall],
        rule: AttentionRule,
        before: PieceLayerKV | None,
    ) -> Tensor:
        output, saved = _packed_forward(query, *_joined(key, value, before), calls, rule)
        ctx.save_for_backward(query, key, value, output, *saved)
        ctx.calls, ctx.rule, ctx.before = calls, rule, before
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, own_key, own_value, output, *saved = ctx.saved_tensors
        key, value = _joined(own_key, own_value, ctx.before)  # again, because saving them would take their memory
        query_grad = torch.empty_like(query)
        # float32, because the keys of a shared prefix sum the gradients of many replies.
        key_grad, value_grad = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
        for number, each in enumerate(ctx.calls):
            own = slice(each.call.start, each.call.stop)
            inputs = (query[:, :, own], _visible(key, each.call), _visible(value, each.call))
            if each.batched_mask is not None:
                call_grads = batched_attention_backward(grads[0][:, :, own], *inputs, each.batched_mask, ctx.rule)
            elif query.device.type == "cpu":
                call_grads = flash_attention_backward(
                    grads[0][:, :, own], inputs, (output[:, :, own], saved[number]), each.mask, ctx.rule
                )
            else:
                call_grads = _recomputed(grads[0][:, :, own], inputs, each.mask, ctx.rule)
            query_grad[:, :, own] = call_grads[0]
            at = 0
            for run in each.call.runs:
                count = run.stop - run.start
                key_grad[:, :, run.start : run.stop] += call_grads[1][:, :, at : at + count]
                value_grad[:, :, run.start : run.stop] += call_grads[2][:, :, at : at + count]
                at += count
        return query_grad, *_own_grads(key_grad, value_grad, ctx.before, key.dtype), None, None, None


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: CompiledCalls,
        scale: float,
        before: PieceLayerKV | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.calls, ctx.scale, ctx.before = calls, scale, before
        return calls.forward(query, [_joined(key, value, before)], scale)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value = ctx.saved_tensors
        joined = _joined(key, value, ctx.before)  # again, because saving them would take their memory
        query_grad, key_grad, value_grad = ctx.calls.backward(grads[0], query, *joined, ctx.scale)
        return query_grad, *_own_grads(key_grad, value_grad, ctx.before, key.dtype), None, None, None


def _own_grads(
    key_grad: Tensor, value_grad: Tensor, before: PieceLayerKV | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of a pass's own keys and values, from the float32 ones of all that `_joined` returned."""
    if before is not None:
        key_grad, value_grad = before.exchange(key_grad, value_grad)
    return key_grad.to(dtype), value_grad.to(dtype)


def _recomputed(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, rule: AttentionRule
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value through PyTorch's own attention, computed again."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = attend(leaves[0], leaves[1], leaves[2], mask, rule)
    return torch.autograd.grad(output, leaves, grad)
