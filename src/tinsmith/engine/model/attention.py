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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from typing_extensions import override

from tinsmith.engine.model import flex_attention
from tinsmith.engine.model.packing import AttentionJob, PackedTree
from tinsmith.errors import Unsupported

MAX_SAVED_KEYS = 256
"""`batched_attention` saves the probabilities of calls over up to this many keys."""
CALL_QUERIES = 128
"""Queries of one call of `batched_attention`: their matrix of scores stays in the CPU's cache."""
MASKED_CALL_QUERIES = 256
"""Queries of one call with a mask on a CPU. The kernel also computes what the mask removes, so a job is split: keys
after a call's last query are left out."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionContext(Protocol):
    """Attention of one forward pass: which keys each query sees."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
        ...


def register(longest: int) -> str:
    """Register the attention function with transformers, for a model that serves rows of up to `longest` tokens.

    Returns the name to pass as attn_implementation. Registering twice changes nothing.
    """
    name = f"tinsmith-{longest}"
    AttentionInterface.register(name, partial(_attention, longest))
    return name


def _attention(
    longest: int,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    context: AttentionContext,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if sliding_window is not None and sliding_window < longest:
        raise Unsupported(
            f"Attention in a window of {sliding_window} tokens would be computed over {longest}.",
            "Serve a model whose config.json names its sliding window.",
        )
    return context.attend(int(module.layer_idx), query, key, value, scaling), None  # pyright: ignore[reportArgumentType]


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

    calls: Sequence[AttentionCall]
    save_kv: bool = False
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values [1, Hkv, T, D] of each layer, if `save_kv`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `AttentionContext.attend`."""
        if self.save_kv:
            self.saved_kv.append((key, value))
        if torch.is_grad_enabled():
            return _PackedAttention.apply(query, key, value, self.calls, scale).transpose(1, 2)  # type: ignore[no-any-return]
        return _packed_forward(query, key, value, self.calls, scale)[0].transpose(1, 2)


def packed_attention(
    tree: PackedTree, dtype: torch.dtype, device: torch.device, save_kv: bool = False
) -> PackedAttention | flex_attention.FlexAttention:
    """Attention over `tree` with the fastest supported kernel. Masks are computed once for all layers.

    With `save_kv`, the keys and values of each layer are kept for the KV cache.
    """
    if flex_attention.is_supported(dtype, device):
        return flex_attention.packed_attention(tree, device, save_kv)
    return PackedAttention([call for job in tree.jobs for call in _calls(job, dtype, device)], save_kv)


def _calls(job: AttentionJob, dtype: torch.dtype, device: torch.device) -> Iterator[AttentionCall]:
    """A job split by queries. A call's prefix is the job's plus the queries before it, so that less is masked."""
    total, cpu = job.stop - job.start, device.type == "cpu"
    batched = cpu and dtype == torch.bfloat16
    step = CALL_QUERIES if batched else MASKED_CALL_QUERIES if cpu and job.mask is not None else total
    depth = 0 if job.mask is None else job.mask.shape[1] - total
    for first in range(0, total, step):
        last = min(first + step, total)
        visible = None if job.mask is None else job.mask[first:last, : depth + last]
        if batched and visible is None:
            visible = causal_mask(last - first, last)
        mask = None if visible is None else additive_mask(visible, dtype, device)
        before = ((job.start, job.start + first),) if first else ()
        start, stop, prefix = job.start + first, job.start + last, (*job.prefix, *before)
        yield (
            AttentionCall(start, stop, prefix, None, mask)
            if batched
            else AttentionCall(start, stop, prefix, mask, None)
        )


def causal_mask(queries: int, keys: int) -> np.ndarray:
    """bool [queries, M]: whether the last queries of a sequence see its last M keys; all of them see earlier keys."""
    # Adding a mask to whole rows of scores is faster than to their ends.
    width = keys if keys <= MAX_SAVED_KEYS else queries
    return np.tri(queries, width, width - queries, dtype=bool)


def additive_mask(visible: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where `visible` is True, -inf where it is False."""
    allowed = torch.as_tensor(visible, device=device)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention without gradients; query heads share key heads in groups. Without a mask it is causal."""
    if query.device.type == "cpu":
        return _flash(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)[0]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def batched_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention as batched products: query [1, Hq, Q, D], key and value [1, Hkv, K, D], additive mask [Q, M].

    The mask applies to the last M keys. Returns [1, Hq, Q, D] and the probabilities for the backward, which are an
    empty tensor if there are more than MAX_SAVED_KEYS keys.
    """
    probs = _probs(_fold(query * scale, key), key, mask)
    output = torch.bmm(probs, value[0]).view(query.shape)
    return output, probs if key.shape[2] <= MAX_SAVED_KEYS else query.new_empty(0)


def batched_attention_backward(
    output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, saved_probs: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `output_grad` [1, Hq, Q, D]."""
    folded, folded_grad = _fold(query * scale, key), _fold(output_grad, key)
    probs = saved_probs if saved_probs.numel() else _probs(folded, key, mask)
    value_grad = torch.bmm(probs.transpose(1, 2), folded_grad)
    score_grad = torch.bmm(folded_grad, value[0].transpose(1, 2))
    torch.ops.aten._softmax_backward_data.out(score_grad, probs, -1, probs.dtype, grad_input=score_grad)
    query_grad = torch.bmm(score_grad, key[0]).mul_(scale).view(query.shape)
    return query_grad, torch.bmm(score_grad.transpose(1, 2), folded)[None], value_grad[None]


def _probs(folded: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[Hkv, G Q, K] of scaled queries [Hkv, G Q, D]; the product and the softmax accumulate in float32."""
    scores = torch.bmm(folded, key[0].transpose(1, 2))
    queries, masked = mask.shape
    scores.view(key.shape[1], -1, queries, key.shape[2])[..., key.shape[2] - masked :] += mask
    return torch.softmax(scores, -1, out=scores)


def _fold(query: Tensor, key: Tensor) -> Tensor:
    """[1, Hq, Q, D] -> [Hkv, G Q, D]."""
    return query[0].reshape(key.shape[1], -1, query.shape[3])


def _visible(tensor: Tensor, call: AttentionCall) -> Tensor:
    """The keys (or values) of a call: its prefix, then its own."""
    runs = (*call.prefix, (call.start, call.stop))
    if all(left[1] == right[0] for left, right in pairwise(runs)):
        return tensor[:, :, runs[0][0] : call.stop]
    return torch.cat([tensor[:, :, start:stop] for start, stop in runs], dim=2)


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[AttentionCall], scale: float
) -> tuple[Tensor, list[Tensor]]:
    """The output, and of each call what its backward needs: probabilities, or the logsumexp of the flash kernel."""
    # [1, T, Hq, D] in memory, so that the output projection reads it without a copy.
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    saved: list[Tensor] = []
    for call in calls:
        own, keys, values = query[:, :, call.start : call.stop], _visible(key, call), _visible(value, call)
        if call.batched_mask is not None:
            result, probs = batched_attention(own, keys, values, call.batched_mask, scale)
            saved.append(probs)
        elif query.device.type == "cpu":
            result, logsumexp = _flash(own, keys, values, 0.0, call.mask is None, attn_mask=call.mask, scale=scale)
            saved.append(logsumexp)
        else:
            result = attend(own, keys, values, call.mask, scale)
        output[:, :, call.start : call.stop] = result
    return output, saved


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[AttentionCall], scale: float
    ) -> Tensor:
        output, saved = _packed_forward(query, key, value, calls, scale)
        ctx.save_for_backward(query, key, value, output, *saved)
        ctx.calls, ctx.scale = calls, scale
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
                    grads[0][:, :, own], *inputs, saved[number], call.batched_mask, ctx.scale
                )
            elif query.device.type == "cpu":
                call_grads = _flash_backward(
                    grads[0][:, :, own], *inputs, output[:, :, own], saved[number], 0.0, call.mask is None,
                    attn_mask=call.mask, scale=ctx.scale,
                )  # fmt: skip
            else:
                call_grads = _recomputed(grads[0][:, :, own], inputs, call.mask, ctx.scale)
            query_grad[:, :, own] = call_grads[0]
            at = 0
            for start, stop in (*call.prefix, (call.start, call.stop)):
                key_grad[:, :, start:stop] += call_grads[1][:, :, at : at + stop - start]
                value_grad[:, :, start:stop] += call_grads[2][:, :, at : at + stop - start]
                at += stop - start
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _recomputed(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value through PyTorch's own attention, computed again."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = attend(leaves[0], leaves[1], leaves[2], mask, scale)
    return torch.autograd.grad(output, leaves, grad)
