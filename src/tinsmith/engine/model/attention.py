"""The attention function that transformers calls, and attention over a packed tree.

`register` makes one attention function known to transformers. Which attention it computes travels with each call as
`context`: `packed_attention` over the packed tree of a pass, or the sampler's over its KV cache.

The rows of a packed pass are one sequence without padding. Each job of the tree is one or more kernel calls over the
runs of its shared prefix and its own positions. On a GPU one FlexAttention call does the whole tree (`flex_attention`)
where that is supported, else `scaled_dot_product_attention`. On a CPU the kernel is PyTorch's flash attention, forward
and backward called directly, so that gradients of a shared prefix accumulate in place.

On CPUs with bfloat16 products, attention is instead computed as batched matrix products (`batched_attention`), with the
query heads that share a key head folded into the rows. This is several times as fast as the flash kernel there, whose
backward computes in float32. Its matrix of probabilities [Hkv, G Q, K] is saved for the backward where it is small and
recomputed where it is not, so that memory grows linearly with the length of a row.

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

from tinsmith.engine.model import flex_attention
from tinsmith.engine.model.architectures.latents import Latents, to_cache
from tinsmith.engine.model.attention_kernels import (
    additive_mask,
    attend,
    batched_attention,
    batched_attention_backward,
    causal_mask,
    equal_widths,
    flash_attention,
    flash_attention_backward,
    needs_products,
)
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import AttentionJob, PackedTree
from tinsmith.errors import Unsupported

NAME = "tinsmith"
"""Of the attention function among those of transformers."""
CALL_QUERIES = 128
"""Queries of one call of `batched_attention`: their matrix of scores stays in the CPU's cache."""
MASKED_CALL_QUERIES = 256
"""Queries of one call with a mask on a CPU. The kernel also computes what the mask removes, so a job is split: keys
after a call's last query are left out."""
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "past_key_values", "output_attentions",
             "output_hidden_states", "return_dict", "is_causal", "position_embeddings"}  # fmt: skip
"""Keywords of transformers' attention modules that change nothing here."""


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
class AttentionCall:
    """A job of the tree, or some of its queries: one kernel call."""

    start: int
    stop: int
    prefix: tuple[tuple[int, int], ...]
    mask: Tensor | None
    """For an attention kernel: additive [Q, P + Q]; None if every query sees the whole prefix and its own past."""
    batched_mask: Tensor | None
    """For `batched_attention`, which computes the call if this is given: additive [Q, M], for the last M keys."""


@dataclass(slots=True)
class PackedAttention:
    """Attention over a packed tree, job by job."""

    tree: PackedTree
    dtype: torch.dtype
    device: torch.device
    save_kv: bool = False
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values [1, Hkv, T, D] of each layer, if `save_kv`, as `to_cache` gives them."""
    _calls: dict[tuple[int | None, bool], list[AttentionCall]] = field(default_factory=dict)
    """By window and whether products compute them: layers with the same rule share the masks."""
    cached_queries: int = 0

    def calls(self, rule: AttentionRule) -> Sequence[AttentionCall]:
        """The calls of a layer with this rule."""
        cpu = self.device.type == "cpu"
        products = (cpu and self.dtype == torch.bfloat16) or needs_products(rule, self.device)
        if (rule.window, products) not in self._calls:
            self._calls[rule.window, products] = [
                call for job in self.tree.jobs for call in self._job_calls(job, rule.window, products)
            ]
        return self._calls[rule.window, products]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `AttentionContext.attend`."""
        if self.save_kv:
            self.saved_kv.append(to_cache(key, value, latents))
        width = value.shape[3]
        query, key, value = equal_widths(query, key, value)
        calls = self.calls(rule)
        if torch.is_grad_enabled():
            output = _PackedAttention.apply(query, key, value, calls, rule)
        else:
            output = _packed_forward(query, key, value, calls, rule)[0]
        return output.transpose(1, 2)[..., :width]  # type: ignore[no-any-return]

    def _job_calls(self, job: AttentionJob, window: int | None, products: bool) -> Iterator[AttentionCall]:
        """A job split by queries. A call's prefix is the job's plus the queries before it, so that less is masked."""
        total = job.stop - job.start
        depth = 0 if job.mask is None else job.mask.shape[1] - total
        split = (self.device.type == "cpu" and job.mask is not None) or (window is not None and depth + total > window)
        step = CALL_QUERIES if products else MASKED_CALL_QUERIES if split else total
        for first in range(0, total, step):
            last = min(first + step, total)
            visible = None if job.mask is None else job.mask[first:last, : depth + last]
            before = ((job.start, job.start + first),) if first else ()
            prefix: tuple[tuple[int, int], ...] = (*job.prefix, *before)
            if window is not None and depth + last > window:
                visible, skipped = self._windowed(job, first, last, visible, window)
                prefix = after(prefix, skipped)
            elif products and visible is None:
                visible = causal_mask(last - first, last)
            elif visible is None and first:
                visible = np.tri(last - first, last, first, dtype=bool)
            mask = None if visible is None else additive_mask(visible, self.dtype, self.device)
            start, stop = job.start + first, job.start + last
            yield (
                AttentionCall(start, stop, prefix, None, mask)
                if products
                else AttentionCall(start, stop, prefix, mask, None)
            )

    def _windowed(
        self, job: AttentionJob, first: int, last: int, visible: np.ndarray | None, window: int
    ) -> tuple[np.ndarray, int]:
        """What the job's queries first..last see within the window, and the number of leading keys that none sees."""
        own = self.tree.positions[job.start : job.stop]
        depth = 0 if job.mask is None else job.mask.shape[1] - len(own)
        key_depths = np.concatenate([np.arange(depth), own[:last]])
        # Only keys before the first query can be out of every query's window.
        skipped = min(int(np.argmax(key_depths > own[first:last].min() - window)), depth + first)
        near = own[first:last, None] - key_depths[None, skipped:] < window
        seen = np.tri(last - first, last, first, dtype=bool) if visible is None else visible
        return seen[:, skipped:] & near, skipped


def packed_attention(
    tree: PackedTree, dtype: torch.dtype, device: torch.device, save_kv: bool = False, *, flex: bool = False
) -> PackedAttention | flex_attention.FlexAttention:
    """Attention over `tree`, by FlexAttention or job by job. Masks are computed once for all layers of a rule.

    With `save_kv`, the keys and values of each layer are collected for the KV cache.
    """
    if flex:
        return flex_attention.packed_attention(tree, device, save_kv)
    return PackedAttention(tree, dtype, device, save_kv)


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
    """The keys (or values) of a call: its prefix, then its own."""
    runs = (*call.prefix, (call.start, call.stop))
    if all(left[1] == right[0] for left, right in pairwise(runs)):
        return tensor[:, :, runs[0][0] : call.stop]
    return torch.cat([tensor[:, :, start:stop] for start, stop in runs], dim=2)


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[AttentionCall], rule: AttentionRule
) -> tuple[Tensor, list[Tensor]]:
    """The output, and of each call what its backward needs: probabilities, or the logsumexp of the flash kernel."""
    # [1, T, Hq, D] in memory, so that the output projection reads it without a copy.
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    saved: list[Tensor] = []
    for call in calls:
        own, keys, values = query[:, :, call.start : call.stop], _visible(key, call), _visible(value, call)
        if call.batched_mask is not None:
            result, probs = batched_attention(own, keys, values, call.batched_mask, rule)
            saved.append(probs)
        elif query.device.type == "cpu":
            result, logsumexp = flash_attention(own, keys, values, call.mask, rule)
            saved.append(logsumexp)
        else:
            result = attend(own, keys, values, call.mask, rule)
        output[:, :, call.start : call.stop] = result
    return output, saved


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[AttentionCall], rule: AttentionRule
    ) -> Tensor:
        output, saved = _packed_forward(query, key, value, calls, rule)
        ctx.save_for_backward(query, key, value, output, *saved)
        ctx.calls, ctx.rule = calls, rule
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, *saved = ctx.saved_tensors
        query_grad = torch.empty_like(query)
        # float32, because the keys of a shared prefix sum the gradients of many replies.
        key_grad, value_grad = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
        for number, call in enumerate(ctx.calls):
            own = slice(call.start, call.stop)
            inputs = (query[:, :, own], _visible(key, call), _visible(value, call))
            if call.batched_mask is not None:
                call_grads = batched_attention_backward(
                    grads[0][:, :, own], *inputs, saved[number], call.batched_mask, ctx.rule
                )
            elif query.device.type == "cpu":
                call_grads = flash_attention_backward(
                    grads[0][:, :, own], inputs, (output[:, :, own], saved[number]), call.mask, ctx.rule
                )
            else:
                call_grads = _recomputed(grads[0][:, :, own], inputs, call.mask, ctx.rule)
            query_grad[:, :, own] = call_grads[0]
            at = 0
            for start, stop in (*call.prefix, (call.start, call.stop)):
                key_grad[:, :, start:stop] += call_grads[1][:, :, at : at + stop - start]
                value_grad[:, :, start:stop] += call_grads[2][:, :, at : at + stop - start]
                at += stop - start
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _recomputed(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, rule: AttentionRule
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value through PyTorch's own attention, computed again."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = attend(leaves[0], leaves[1], leaves[2], mask, rule)
    return torch.autograd.grad(output, leaves, grad)
