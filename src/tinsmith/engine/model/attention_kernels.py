"""Attention of one call, forward and backward: PyTorch's flash kernel for CPUs, and batched matrix products.

Sinks need no kernel of their own. With l = logsumexp of a query's scores and the sink s of its head, the output of the
kernel is multiplied by sigmoid(l - s), and the backward of the same kernel, given that output and l + softplus(s - l),
gives the gradients. The kernel takes no soft cap: such scores are computed by batched products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from tinsmith.engine.model.attention_rule import AttentionRule

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def needs_products(rule: AttentionRule, device: torch.device) -> bool:
    """Whether no kernel of `attend` computes the rule on this device, so that it is written out as products."""
    return rule.softcap is not None or (rule.sinks is not None and device.type != "cpu")


def additive_mask(visible: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where `visible` is True, -inf where it is False."""
    allowed = torch.as_tensor(visible, device=device)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """Attention without gradients; query heads share key heads in groups. Without a mask it is causal.

    Widths of keys and values may differ. Not for rules that `needs_products`.
    """
    if query.device.type == "cpu":
        width = value.shape[3]
        return flash_attention(*equal_widths(query, key, value), mask, rule)[0][..., :width]
    if query.shape[2] == 1 and mask is not None:  # PyTorch has no kernel for groups with a mask: a group as its queries
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
        output = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=rule.scale)
        return output.reshape(*query.shape[:3], value.shape[3])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=rule.scale, enable_gqa=True
    )


def equal_widths(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors padded with zeros to one width, which the kernels for CPUs need: it changes no score."""
    width = max(key.shape[3], value.shape[3])
    query, key, value = (
        tensor if tensor.shape[3] == width else pad(tensor, (0, width - tensor.shape[3]))
        for tensor in (query, key, value)
    )
    return query, key, value


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp [1, Hq, Q] for `flash_attention_backward`, both with the rule's sinks."""
    output, logsumexp = _flash(query, key, value, 0.0, mask is None, attn_mask=mask, scale=rule.scale)
    if rule.sinks is None:
        return output, logsumexp
    sinks = rule.sinks.to(logsumexp.dtype)[:, None]
    share = torch.sigmoid(logsumexp - sinks)[..., None]
    return (output * share).to(output.dtype), logsumexp + softplus(sinks - logsumexp, threshold=50)


def flash_attention_backward(
    output_grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor],
    mask: Tensor | None,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `output_grad`; `saved` is what `flash_attention` returned."""
    return _flash_backward(  # type: ignore[no-any-return]
        output_grad, *inputs, *saved, 0.0, mask is None, attn_mask=mask, scale=rule.scale
    )


def batched_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Attention as batched products: query [1, Hq, Q, D], key and value [1, Hkv, K, D], additive mask [Q, M], which
    applies to the last M keys. Returns [1, Hq, Q, D]."""
    scores = _scores(_scaled_queries(query[0], rule.scale, key.shape[1]), key, mask, rule)
    return torch.bmm(_probs(scores, rule), value[0]).view(*query.shape[:3], value.shape[3])


def batched_attention_backward(
    output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `output_grad` [1, Hq, Q, D]; the probabilities are computed again."""
    folded, folded_grad = _scaled_queries(query[0], rule.scale, key.shape[1]), _fold(output_grad, key)
    cap_grad, scores = None, _scores(folded, key, mask, rule)
    if rule.softcap is not None:
        # d c tanh(s / c) / d s, at the capped score; a masked one is -inf and has no gradient anyway
        capped = scores.clamp(min=-rule.softcap).div_(rule.softcap)
        cap_grad = capped.square_().neg_().add_(1)
    probs = _probs(scores, rule)
    value_grad = torch.bmm(probs.transpose(1, 2), folded_grad)
    score_grad = torch.bmm(folded_grad, value[0].transpose(1, 2))
    torch.ops.aten._softmax_backward_data.out(score_grad, probs, -1, probs.dtype, grad_input=score_grad)
    if cap_grad is not None:
        score_grad *= cap_grad
    query_grad = torch.bmm(score_grad, key[0]).mul_(rule.scale).view(query.shape)
    return query_grad, torch.bmm(score_grad.transpose(1, 2), folded)[None], value_grad[None]


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax of scores [Hkv, G Q, K] in which each query head's sink (of sinks [Hkv G]) takes its part."""
    per_row = sinks.to(scores.dtype).view(len(scores), -1, 1)
    per_row = per_row.expand(-1, -1, scores.shape[1] // per_row.shape[1]).reshape(len(scores), -1, 1)
    return torch.softmax(torch.cat([scores, per_row], -1), -1)[..., :-1].contiguous()


def cap_scores(scores: Tensor, rule: AttentionRule) -> Tensor:
    """Scores under the rule's soft cap, in place."""
    return scores if rule.softcap is None else scores.div_(rule.softcap).tanh_().mul_(rule.softcap)


def _scores(folded: Tensor, key: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Masked scores [Hkv, G Q, K] of scaled queries [Hkv, G Q, D]; the product accumulates in float32."""
    scores = cap_scores(torch.bmm(folded, key[0].transpose(1, 2)), rule)
    queries, masked = mask.shape
    scores.view(key.shape[1], -1, queries, key.shape[2])[..., key.shape[2] - masked :] += mask
    return scores


def _probs(scores: Tensor, rule: AttentionRule) -> Tensor:
    """The softmax of the scores, in float32 inside; overwrites them."""
    return torch.softmax(scores, -1, out=scores) if rule.sinks is None else softmax_with_sinks(scores, rule.sinks)


def _scaled_queries(query: Tensor, scale: float, heads: int) -> Tensor:
    """query [Hq, Q, D] times the scale, [Hkv, G Q, D]: those that share a key head are rows of one matrix."""
    folded = query.new_empty(heads, len(query) // heads, *query.shape[1:])
    return torch.mul(query.unflatten(0, (heads, -1)), scale, out=folded).flatten(1, 2)


def _fold(query: Tensor, key: Tensor) -> Tensor:
    """[1, Hq, Q, D] -> [Hkv, G Q, D]."""
    return query[0].reshape(key.shape[1], -1, query.shape[3])
