"""The gated delta rule on chunks of tokens, forward and backward written by hand.

For each head of a chunk of C tokens, with the decays a, their products e_i = a_1 ... a_i, D_ij = e_i / e_j for j <= i
and the initial state S:

    T  = (I + tril(b_i (k_i . k_j) D_ij, -1))^-1          the corrections' triangular system, inverted
    u  = T b (v - e K S)                                  what each token adds to the state
    o  = e Q S + tril((q_i . k_j) D_ij) u
    S' = e_C S + sum_j (e_C / e_j) k_j u_j^T              the next chunk's initial state

Only u and S' of a chunk need S, and S' is the S of its children: these two are computed level by level of the tree, in
a few products, and everything else for all chunks at once. Through autograd, the backward takes twice as long, most of
it in the triangular system and in elementwise operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors
from tinsmith.engine.model.precision import cumulative_sum

NORM_EPS = 1e-6
MIN_DECAY = -80.0
"""Logarithm of the smallest factor between two tokens of a chunk. Denormal numbers would slow the products down."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads and widths of a layer."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def keys(self) -> int:
        """Columns of the queries, and of the keys."""
        return self.key_heads * self.key_width


ChunkRule = Callable[[Tensor, Tensor, Tensor, HeadShape, ChunkTensors, Tensor | None], tuple[Tensor, Tensor]]
"""Computes what `chunk_rule` does."""


def chunk_rule(
    qkv: Tensor, decay: Tensor, beta: Tensor, shape: HeadShape, tree: ChunkTensors, outside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [C, Hv, dv] of the pass's C tokens and the states [ends, Hv, dk, dv] at the tree's ends.

    qkv [N, size, channels] holds queries, keys and values of the chunks' slots, not normalized; decay (<= 0) and beta
    [C, Hv]. Value heads that share a key head are neighbours. The states `outside` [states, Hv, dk, dv] get no
    gradient. Computed in float32 at least.
    """
    return _ChunkRule.apply(qkv, decay, beta, shape, tree, outside)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What does not depend on the states, of N chunks with Hk key heads and H value heads."""

    queries_keys: Tensor
    """[N, Hk, 2 size, dk]: normalized queries (scaled), then keys."""
    inverse_norms: Tensor
    """[N, Hk, 2 size, 1]: the factors from the raw queries and keys to these."""
    value: Tensor
    """[N, H, size, dv]."""
    beta: Tensor
    """[N, H, size, 1]."""
    since_start: Tensor
    """[N, H, size, 1]: e."""
    until_end: Tensor
    """[N, H, size, 1]: e_C / e."""
    between: Tensor
    """[N, H, size, size]: D; 0 above the diagonal."""
    attention: Tensor
    """[N, H, size, size]: (q_i . k_j) D_ij."""
    similarity: Tensor
    """[N, H, size, size]: (k_i . k_j) D_ij."""
    inverse: Tensor
    """[N, H, size, size]: T."""

    @property
    def size(self) -> int:
        return self.value.shape[2]

    @property
    def sharing(self) -> int:
        """Value heads of a key head."""
        return self.value.shape[1] // self.queries_keys.shape[1]

    def each(self, rows: Tensor) -> Tensor:
        """[N, Hk, ...] -> [N, H, ...]: of the key head of each value head."""
        return rows.repeat_interleave(self.sharing, 1) if self.sharing > 1 else rows

    def summed(self, rows: Tensor) -> Tensor:
        """[N, H, ...] -> [N, Hk, ...]: sums over the value heads of each key head."""
        return rows.unflatten(1, (-1, self.sharing)).sum(2) if self.sharing > 1 else rows


@dataclass(frozen=True, slots=True)
class _Scan:
    """What depends on the states. The first `fresh` chunks start from zeros; `begun` are the others."""

    fresh: int
    states: Tensor
    """[begun, H, dk, dv]: initial states."""
    correction: Tensor
    """[begun, H, size, dk]: u changes by -correction S."""
    written: Tensor
    """[N, H, size, dk]: (e_C / e) k."""
    added: Tensor
    """[N, H, size, dv]: u."""


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[N, H, A, B] times [N, H, B, X]."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:3], right.shape[3])


def _add_product(onto: Tensor, left: Tensor, right: Tensor, sign: int = 1) -> None:
    """The same, added to a contiguous tensor, which may be a slice of chunks."""
    onto.view(-1, *onto.shape[2:]).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), alpha=sign)


def _heads(columns: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[N, size, columns] -> [N, heads, size, columns / heads] in memory of its own."""
    view = columns.unflatten(2, (heads, -1)).transpose(1, 2)
    return torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view)


def _columns(heads: Tensor) -> Tensor:
    """[N, heads, size, width] -> [N, size, columns]."""
    return heads.transpose(1, 2).flatten(2)


def _chunks(qkv: Tensor, decay: Tensor, beta: Tensor, shape: HeadShape) -> _Chunks:
    size, dtype = qkv.shape[1], torch.promote_types(qkv.dtype, torch.float32)
    raw = qkv[:, :, : 2 * shape.keys].unflatten(2, (2, shape.key_heads, -1)).permute(0, 3, 2, 1, 4)
    qk = torch.empty(raw.shape, dtype=dtype, device=raw.device).copy_(raw)  # [N, Hk, 2, size, dk]
    inverse_norms = qk.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
    inverse_norms[:, :, 0] *= shape.key_width**-0.5
    qk, inverse_norms = qk.mul_(inverse_norms).flatten(2, 3), inverse_norms.flatten(2, 3)
    summed, strength = (_heads(part, shape.value_heads, dtype) for part in (cumulative_sum(decay, 1), beta))
    between = (summed - summed.mT).clamp_(MIN_DECAY, 0).exp_().tril_()
    grouped = between.unflatten(1, (shape.key_heads, -1))
    products = _product(qk, qk[:, :, size:].mT)
    attention, similarity = ((part[:, :, None] * grouped).flatten(1, 2) for part in products.split(size, 2))
    identity = torch.eye(size, dtype=dtype, device=qkv.device)
    inverse = torch.linalg.solve_triangular(similarity * strength, identity, upper=False, unitriangular=True)
    return _Chunks(
        queries_keys=qk,
        inverse_norms=inverse_norms,
        value=_heads(qkv[:, :, 2 * shape.keys :], shape.value_heads, dtype),
        beta=strength,
        since_start=summed.exp(),
        until_end=(summed[:, :, -1:] - summed).exp_(),
        between=between,
        attention=attention,
        similarity=similarity,
        inverse=inverse.contiguous(),
    )


def _scan(chunks: _Chunks, tree: ChunkTensors, outside: Tensor | None) -> tuple[_Scan, Tensor]:
    """The levels, one after the other; also the end states [ends, H, dk, dv]."""
    first = tree.levels[0]
    fresh = first.stop if outside is None or first.parents is None else 0
    keys = chunks.each(chunks.queries_keys[:, :, chunks.size :])
    added = _product(chunks.inverse, chunks.value * chunks.beta)
    written = keys * chunks.until_end
    strength = (chunks.since_start * chunks.beta)[fresh:]
    correction = _product(chunks.inverse[fresh:], keys[fresh:] * strength)
    width = (keys.shape[3], added.shape[3])
    states = added.new_empty(len(correction), added.shape[1], *width)
    ends = added.new_empty(sum(len(level.ends) for level in tree.levels), *states.shape[1:])
    if not fresh and outside is not None:
        states[: first.stop] = torch.cat([outside, outside.new_zeros(1, *outside.shape[1:])])[first.parents]
    for number, level in enumerate(tree.levels):
        at, own = slice(level.start, level.stop), slice(level.start - fresh, level.stop - fresh)
        begun = level.start >= fresh
        if begun:
            _add_product(added[at], correction[own], states[own], -1)
        child = tree.levels[number + 1] if number + 1 < len(tree.levels) else None
        if child is None and not len(level.ends):
            break
        after = _product(written[at].mT, added[at])
        if begun:
            after.addcmul_(states[own], chunks.since_start[at, :, -1:])
        if child is not None:
            states[child.start - fresh : child.stop - fresh] = after if child.parents is None else after[child.parents]
        if len(level.ends):
            ends[level.end_numbers] = after[level.ends]
    return _Scan(fresh, states, correction, written, added), ends


def _outputs(chunks: _Chunks, scan: _Scan) -> Tensor:
    """[N, H, size, dv]."""
    output, fresh = _product(chunks.attention, scan.added), scan.fresh
    queries = chunks.each(chunks.queries_keys[fresh:, :, : chunks.size])
    _add_product(output[fresh:], queries * chunks.since_start[fresh:], scan.states)
    return output


class _ChunkRule(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        qkv: Tensor,
        decay: Tensor,
        beta: Tensor,
        shape: HeadShape,
        tree: ChunkTensors,
        outside: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chunks = _chunks(qkv, tree.scatter(decay), tree.scatter(beta), shape)
        scan, ends = _scan(chunks, tree, outside)
        ctx.work, ctx.tree, ctx.dtype = (chunks, scan), tree, qkv.dtype
        return tree.collect(_columns(_outputs(chunks, scan))).unflatten(1, (shape.value_heads, -1)), ends

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (chunks, scan), tree = ctx.work, ctx.tree
        ctx.work = None
        grad = _heads(tree.scatter(grads[0].flatten(1)), chunks.value.shape[1], chunks.value.dtype)
        qk_grad, value_grad, *rest = _gradients(chunks, scan, tree, grad, grads[1])
        qk_grad = qk_grad.unflatten(2, (2, -1)).permute(0, 3, 2, 1, 4).flatten(2)
        qkv_grad = torch.cat([qk_grad, _columns(value_grad)], 2).to(ctx.dtype)
        decay_grad, beta_grad = (tree.collect(_columns(part)) for part in rest)
        return qkv_grad, decay_grad, beta_grad, None, None, None


def _gradients(
    chunks: _Chunks, scan: _Scan, tree: ChunkTensors, grad: Tensor, end_grads: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the raw queries and keys [N, Hk, 2 size, dk], the values, the decays and beta, from `grad` of the
    outputs [N, H, size, dv]."""
    size, qk = chunks.size, chunks.queries_keys
    of_added, after = _state_gradients(chunks, scan, tree, grad, end_grads)
    wanted = _product(chunks.inverse.mT, of_added)  # the gradient of b (v - e K S)
    system = _product(wanted, scan.added.mT).neg_().tril_(-1)
    attention = _product(grad, scan.added.mT)
    value, beta = wanted * chunks.beta, (wanted * chunks.value).sum(-1, keepdim=True)
    by_system = system * chunks.similarity
    beta += by_system.sum(-1, keepdim=True)
    # D_ij = exp(summed_i - summed_j): its relative changes add up in rows and in columns.
    relative = by_system.mul_(chunks.beta).addcmul_(attention, chunks.attention)
    summed = relative.sum(-1, keepdim=True) - relative.sum(-2, keepdim=True).mT
    products = [attention.mul_(chunks.between), system.mul_(chunks.between).mul_(chunks.beta)]
    of_products = torch.cat([chunks.summed(part) for part in products], 2)  # [N, Hk, 2 size, size]
    qk_grad, keys = _product(of_products, qk[:, :, size:]), _product(of_products.mT, qk)
    keys += chunks.summed(_write_gradients(chunks, scan, after, summed))
    qk_grad[:, :, size:] += keys
    if len(scan.states):
        _read_gradients(chunks, scan, (grad, wanted), after, (qk_grad, beta, summed))
    decay = cumulative_sum(summed.flip(2), 2).flip(2)  # the decays of a chunk are summed up from its start
    along = (qk_grad * qk).sum(-1, keepdim=True)
    along[:, :, :size] *= qk.shape[3]  # queries are scaled by 1 / sqrt(width)
    return qk_grad.addcmul_(qk, along, value=-1).mul_(chunks.inverse_norms), value, decay, beta


def _state_gradients(
    chunks: _Chunks, scan: _Scan, tree: ChunkTensors, grad: Tensor, end_grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of u [N, H, size, dv], and of the states after each chunk [N, H, dk, dv]."""
    fresh, added = scan.fresh, _product(chunks.attention.mT, grad)
    queries = chunks.each(chunks.queries_keys[fresh:, :, : chunks.size]) * chunks.since_start[fresh:]
    states = _product(queries.mT, grad[fresh:])
    after = added.new_zeros(len(added), *scan.states.shape[1:])
    last = tree.levels[-1]
    for number, level in reversed(list(enumerate(tree.levels))):
        at, own = slice(level.start, level.stop), slice(level.start - fresh, level.stop - fresh)
        if len(level.ends):
            after[at].index_add_(0, level.ends, end_grads[level.end_numbers].to(after.dtype))
        continued = level is not last or len(level.ends) > 0
        if continued:
            _add_product(added[at], scan.written[at], after[at])
        if level.start < fresh or not number:
            break
        _add_product(states[own], scan.correction[own].mT, added[at], -1)
        if continued:
            states[own].addcmul_(after[at], chunks.since_start[at, :, -1:])
        before = tree.levels[number - 1]
        target = after[before.start : before.stop]
        if level.parents is None:
            target.copy_(states[own])
        else:
            target.index_add_(0, level.parents, states[own])
    return added, after


def _write_gradients(chunks: _Chunks, scan: _Scan, after: Tensor, summed: Tensor) -> Tensor:
    """The gradient of the keys [N, H, size, dk] by what they write to states; adds that of the summed decays."""
    grad = _product(scan.added, after.mT)
    relative = (grad * scan.written).sum(-1, keepdim=True)
    summed -= relative
    summed[:, :, -1:] += relative.sum(2, keepdim=True)
    return grad.mul_(chunks.until_end)


def _read_gradients(
    chunks: _Chunks, scan: _Scan, grads: tuple[Tensor, Tensor], after: Tensor, onto: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add what comes from the initial states to the gradients of queries and keys, beta and the summed decays.

    `grads` are those of the outputs and of b (v - e K S).
    """
    fresh, size = scan.fresh, chunks.size
    since, strength = chunks.since_start[fresh:], chunks.beta[fresh:]
    qk_grad, beta, summed = (part[fresh:] for part in onto)
    rows = _product(torch.cat([part[fresh:] for part in grads], 2), scan.states.mT)  # [n, H, 2 size, dk]
    rows *= torch.cat([since, -since], 2)
    relative = (rows * chunks.each(chunks.queries_keys[fresh:])).sum(-1, keepdim=True)
    beta += relative[:, :, size:]
    relative[:, :, size:] *= strength
    rows[:, :, size:] *= strength
    summed += relative[:, :, :size] + relative[:, :, size:]
    qk_grad += chunks.summed(rows)
    last = (after[fresh:] * scan.states).sum((2, 3))[..., None]
    summed[:, :, -1] += last * since[:, :, -1]
