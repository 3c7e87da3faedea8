"""The one attention function given to transformers, in its two forms.

`packed`: all rows of a pass stand in one sequence without padding; each job of the forest is one call that looks at the
runs of its shared prefix and at itself. `cached`: one new token of every running sequence, each against its own
rows of the sampler's cache. Which of the two is meant, and its plan, travels with the call as `context`.

The kernel is PyTorch's flash attention for CPUs, forward and backward called by hand so that gradients of a shared
prefix add up in place; on GPUs it is one call for the whole forest (`flex.py`), and where that cannot be had
`scaled_dot_product_attention` with its own backward.
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

from tinsmith.engine.model import flex_attention
from tinsmith.engine.model.packing import Forest, Job
from tinsmith.errors import Unsupported

KEPT_KEYS = 256
"""Jobs that look at no more keys keep their chances."""


def past(queries: int, keys: int) -> np.ndarray:
    """bool [queries, M]: whether the last queries of a sequence see its last M keys; all of them see those before."""
    width = keys if keys <= KEPT_KEYS else queries  # what is masked is added faster to whole rows than to their ends
    return np.tri(queries, width, width - queries, dtype=bool)


def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query [1, Hq, Q, D], key and value [1, Hkv, K, D]; mask additive [Q, M], for the last M keys.

    Returns [1, Hq, Q, D] and what the backward wants: the chances, or an empty tensor.
    """
    chances = _chances(_fold(query * scale, key), key, mask)
    output = torch.bmm(chances, value[0]).view(query.shape)
    return output, chances if key.shape[2] <= KEPT_KEYS else query.new_empty(0)


def backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `slope` [1, Hq, Q, D]."""
    folded, slopes = _fold(query * scale, key), _fold(slope, key)
    chances = kept if kept.numel() else _chances(folded, key, mask)
    of_value = torch.bmm(chances.transpose(1, 2), slopes)
    of_scores = torch.bmm(slopes, value[0].transpose(1, 2))
    torch.ops.aten._softmax_backward_data.out(of_scores, chances, -1, chances.dtype, grad_input=of_scores)
    of_query = torch.bmm(of_scores, key[0]).mul_(scale).view(query.shape)
    return of_query, torch.bmm(of_scores.transpose(1, 2), folded)[None], of_value[None]


def _chances(folded: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[Hkv, G Q, K] of scaled queries [Hkv, G Q, D]; sums are float32 inside the product and the softmax."""
    scores = torch.bmm(folded, key[0].transpose(1, 2))
    queries, masked = mask.shape
    scores.view(key.shape[1], -1, queries, key.shape[2])[..., key.shape[2] - masked :] += mask
    return torch.softmax(scores, -1, out=scores)


def _fold(query: Tensor, key: Tensor) -> Tensor:
    """[1, Hq, Q, D] -> [Hkv, G Q, D]."""
    return query[0].reshape(key.shape[1], -1, query.shape[3])


QUERIES = 128
"""Of a piece of a job, where plain products are used: their matrix of scores stays in the cache."""
MASKED_QUERIES = 256
"""Of a piece of a job with a mask, on a CPU: its kernel computes also what the mask takes away, and of the keys after a
piece's last query there are none."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Context(Protocol):
    """What a forward pass knows that transformers does not."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
        ...


def register(longest: int) -> str:
    """Make the function known to transformers, for a model of which rows of up to `longest` tokens are computed; gives
    its name there. Doing it twice changes nothing."""
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
    context: Context,
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
class PackedJob:
    """A job of the forest, or a piece of one."""

    start: int
    stop: int
    prefix: tuple[tuple[int, int], ...]
    mask: Tensor | None
    """For a kernel: additive [Q, P + Q], or None where every query sees the whole prefix and its own past."""
    added: Tensor | None
    """For plain products, where these are faster: additive [Q, M], of the last M keys."""


@dataclass(slots=True)
class Packed:
    """Attention over a forest. With `keep`, keys and values stay: [1, Hkv, T, D] for each layer, in order."""

    jobs: Sequence[PackedJob]
    keep: bool = False
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.keep:
            self.kept.append((key, value))
        if torch.is_grad_enabled():
            return _PackedAttention.apply(query, key, value, self.jobs, scale).transpose(1, 2)  # type: ignore[no-any-return]
        return _packed_forward(query, key, value, self.jobs, scale)[0].transpose(1, 2)


def packed(
    forest: Forest, dtype: torch.dtype, device: torch.device, keep: bool = False
) -> Packed | flex_attention.Flexed:
    """The context of a pass over `forest`, by the best kernel there is here; masks are made once for every layer."""
    if flex_attention.suits(dtype, device):
        return flex_attention.flexed(forest, device, keep)
    jobs = [piece for job in forest.jobs for piece in _pieces(job, dtype, device)]
    return Packed(jobs, keep)


def _pieces(job: Job, dtype: torch.dtype, device: torch.device) -> Iterator[PackedJob]:
    """A job in pieces of some queries: a piece's prefix is the job's and what is before it, so less is masked away."""
    total, cpu = job.stop - job.start, device.type == "cpu"
    plain = cpu and dtype == torch.bfloat16
    step = QUERIES if plain else MASKED_QUERIES if cpu and job.mask is not None else total
    depth = 0 if job.mask is None else job.mask.shape[1] - total
    for first in range(0, total, step):
        last = min(first + step, total)
        seen = None if job.mask is None else job.mask[first:last, : depth + last]
        if plain and seen is None:
            seen = past(last - first, last)
        mask = None if seen is None else additive(seen, dtype, device)
        before = ((job.start, job.start + first),) if first else ()
        where = job.start + first, job.start + last, (*job.prefix, *before)
        yield PackedJob(*where, None, mask) if plain else PackedJob(*where, mask, None)


def additive(mask: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """True -> 0, False -> -inf."""
    allowed = torch.as_tensor(mask, device=device)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One call without gradients; query heads share key heads in groups. Mask None is causal."""
    if query.device.type == "cpu":
        return _flash(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)[0]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _visible(tensor: Tensor, job: PackedJob) -> Tensor:
    """The keys (or values) of a job: its prefix runs, then its own."""
    runs = (*job.prefix, (job.start, job.stop))
    if all(one[1] == two[0] for one, two in pairwise(runs)):
        return tensor[:, :, runs[0][0] : job.stop]
    return torch.cat([tensor[:, :, start:stop] for start, stop in runs], dim=2)


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, jobs: Sequence[PackedJob], scale: float
) -> tuple[Tensor, list[Tensor]]:
    # [1, T, Hq, D] in memory, so that the output projection reads it as it stands.
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    sums: list[Tensor] = []
    for job in jobs:
        own, keys, values = query[:, :, job.start : job.stop], _visible(key, job), _visible(value, job)
        if job.added is not None:
            result, kept = forward(own, keys, values, job.added, scale)
            sums.append(kept)
        elif query.device.type == "cpu":
            result, logsumexp = _flash(own, keys, values, 0.0, job.mask is None, attn_mask=job.mask, scale=scale)
            sums.append(logsumexp)
        else:
            result = attend_once(own, keys, values, job.mask, scale)
        output[:, :, job.start : job.stop] = result
    return output, sums


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, jobs: Sequence[PackedJob], scale: float) -> Tensor:
        output, sums = _packed_forward(query, key, value, jobs, scale)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.jobs, ctx.scale = jobs, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, *sums = ctx.saved_tensors
        # Keys that many answers look at get many gradients: their sum is float32.
        into = [torch.empty_like(query), *(torch.zeros_like(one, dtype=torch.float32) for one in (key, value))]
        for number, job in enumerate(ctx.jobs):
            own = slice(job.start, job.stop)
            saved = (query[:, :, own], _visible(key, job), _visible(value, job))
            if job.added is not None:
                found = backward(grads[0][:, :, own], *saved, sums[number], job.added, ctx.scale)
                d_query, d_key, d_value = found
            elif query.device.type == "cpu":
                d_query, d_key, d_value = _flash_backward(
                    grads[0][:, :, own], *saved, output[:, :, own], sums[number], 0.0, job.mask is None,
                    attn_mask=job.mask, scale=ctx.scale,
                )  # fmt: skip
            else:
                d_query, d_key, d_value = _recomputed(grads[0][:, :, own], saved, job.mask, ctx.scale)
            into[0][:, :, own] = d_query
            at = 0
            for start, stop in (*job.prefix, (job.start, job.stop)):
                into[1][:, :, start:stop] += d_key[:, :, at : at + stop - start]
                into[2][:, :, start:stop] += d_value[:, :, at : at + stop - start]
                at += stop - start
        return into[0], into[1].to(key.dtype), into[2].to(value.dtype), None, None


def _recomputed(
    grad: Tensor, saved: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """Gradients through PyTorch's own attention, where no kernel is called by hand."""
    leaves = [tensor.detach().requires_grad_() for tensor in saved]
    with torch.enable_grad():
        output = attend_once(leaves[0], leaves[1], leaves[2], mask, scale)
    return torch.autograd.grad(output, leaves, grad)
