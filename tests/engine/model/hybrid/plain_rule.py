"""`fused.RuleKernels` in PyTorch's operators: for machines without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.chunk_rule import NORM_EPS
from tinsmith.engine.model.hybrid.rule.fused import RuleInputs


class PlainRule:
    """Each method computes all chunks in float32; the scans go through them one after the other."""

    def corrections(self, inputs: RuleInputs) -> tuple[Tensor, Tensor, Tensor]:
        chunks = _Chunks(inputs)
        strength = chunks.beta[..., None]
        system = (chunks.keys @ chunks.keys.mT * chunks.between * strength).tril(-1)
        inverse = torch.linalg.inv(torch.eye(inputs.size) + system)
        read = inverse @ (chunks.keys * chunks.summed.exp()[..., None] * strength)
        return inverse, read, inverse @ (chunks.values * strength)

    def scan(self, inputs: RuleInputs, correction: Tensor, added: Tensor, states: Tensor) -> None:
        chunks = _Chunks(inputs)
        for chunk in inputs.order.tolist():
            state = _initial(inputs, states)[chunk]
            added[chunk] -= correction[chunk] @ state
            if inputs.final[chunk] >= 0:
                states[inputs.final[chunk]] = chunks.faded(state, chunk) + chunks.written[chunk].mT @ added[chunk]

    def outputs(self, inputs: RuleInputs, added: Tensor, states: Tensor) -> Tensor:
        chunks = _Chunks(inputs)
        reads = chunks.queries * chunks.summed.exp()[..., None]
        return _collected(inputs, chunks.attention @ added + reads @ _initial(inputs, states))

    def added_gradients(self, inputs: RuleInputs, grad: Tensor) -> Tensor:
        return _Chunks(inputs).attention.mT @ _slots(inputs, grad)

    def scan_gradients(
        self, inputs: RuleInputs, correction: Tensor, grad: Tensor, of_added: Tensor, after: Tensor
    ) -> None:
        chunks, grads = _Chunks(inputs), _slots(inputs, grad)
        reads = chunks.queries * chunks.summed.exp()[..., None]
        for chunk in reversed(inputs.order.tolist()):
            final, initial = int(inputs.final[chunk]), int(inputs.initial[chunk])
            state = after[final] if final >= 0 else torch.zeros(after.shape[1:])
            of_added[chunk] += chunks.written[chunk] @ state
            if initial >= 0:
                after[initial] += chunks.faded(state, chunk) + reads[chunk].mT @ grads[chunk]
                after[initial] -= correction[chunk].mT @ of_added[chunk]

    def value_gradients(
        self, inputs: RuleInputs, inverse: Tensor, added: Tensor, grad: Tensor, of_added: Tensor, qkv_grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks, wanted = _Chunks(inputs), inverse.mT @ of_added
        qkv_grad[:, :, 2 * inputs.shape.keys :] = (wanted * chunks.beta[..., None]).transpose(1, 2).flatten(2)
        products = torch.stack([_slots(inputs, grad) @ added.mT, -wanted @ added.mT], 2)
        return wanted, products, _numbers(inputs, (wanted * chunks.values).sum(-1))

    def product_gradients(self, inputs: RuleInputs, products: Tensor, beta_grad: Tensor) -> Tensor:
        chunks = _Chunks(inputs)
        attention, system = products[:, :, 0], products[:, :, 1].tril(-1)
        by_system = system * (chunks.keys @ chunks.keys.mT) * chunks.between
        beta_grad += _numbers(inputs, by_system.sum(-1))
        relative = by_system * chunks.beta[..., None] + attention * chunks.attention
        products[:, :, 0] = attention * chunks.between
        products[:, :, 1] = system * chunks.between * chunks.beta[..., None]
        return _numbers(inputs, relative.sum(-1) - relative.sum(-2))

    def state_gradients(
        self,
        inputs: RuleInputs,
        added: Tensor,
        states: Tensor,
        grad: Tensor,
        wanted: Tensor,
        after: Tensor,
        summed_grad: Tensor,
        beta_grad: Tensor,
    ) -> Tensor:
        chunks, initial = _Chunks(inputs), _initial(inputs, states)
        ends = torch.cat([after, after.new_zeros(1, *after.shape[1:])])[inputs.final.long()]
        since, total = chunks.summed.exp()[..., None], chunks.summed[..., -1:]
        queried, read = since * (_slots(inputs, grad) @ initial.mT), -since * (wanted @ initial.mT)
        written = (total - chunks.summed).exp()[..., None] * (added @ ends.mT)
        by_key, along = (read * chunks.keys).sum(-1), (written * chunks.keys).sum(-1)
        beta_grad += _numbers(inputs, by_key)
        summed = by_key * chunks.beta + (queried * chunks.queries).sum(-1) - along
        summed += _slots(inputs, summed_grad[..., None]).squeeze(-1)
        last = (ends * initial).sum((2, 3))[..., None] * total.exp() + along.sum(-1, keepdim=True)
        summed_grad.copy_(_numbers(inputs, summed.flip(-1).cumsum(-1).flip(-1) + last))
        return torch.cat([queried, written + read * chunks.beta[..., None]], -1)

    def unit_gradients(self, inputs: RuleInputs, products: Tensor, units: Tensor) -> None:
        chunks = _Chunks(inputs)
        (attention, system), (queries, keys) = products.unbind(2), units.chunk(2, -1)
        queries += attention @ chunks.keys
        keys += attention.mT @ chunks.queries + (system + system.mT) @ chunks.keys

    def norm_gradients(self, inputs: RuleInputs, units: Tensor, qkv_grad: Tensor) -> None:
        keys = 2 * inputs.shape.keys
        raw = inputs.qkv[:, :, :keys].float().detach().requires_grad_()
        with torch.enable_grad():
            outputs = _units(raw, inputs)
            grads = torch.autograd.grad(outputs, [raw], list(units.chunk(2, -1)))
        qkv_grad[:, :, :keys] = grads[0]


class _Chunks:
    """What does not depend on the states, [N, H, size, ...]."""

    def __init__(self, inputs: RuleInputs) -> None:
        keys = 2 * inputs.shape.keys
        self.queries, self.keys = _units(inputs.qkv[:, :, :keys].float(), inputs)
        self.values = inputs.qkv[:, :, keys:].float().unflatten(2, (inputs.shape.value_heads, -1)).transpose(1, 2)
        self.decay, self.beta = (_slots(inputs, part[..., None]).squeeze(-1) for part in (inputs.decay, inputs.beta))
        self.summed = self.decay.cumsum(-1)
        self.written = self.keys * (self.summed[..., -1:] - self.summed).exp()[..., None]
        self.between = (self.summed[..., None] - self.summed[..., None, :]).clamp(max=0).exp().tril()
        self.attention = (self.queries @ self.keys.mT) * self.between

    def faded(self, state: Tensor, chunk: int) -> Tensor:
        """A state [H, dk, dv] after the decays of a chunk."""
        return state * self.summed[chunk, :, -1].exp()[:, None, None]


def _units(raw: Tensor, inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """Normalized queries and keys of each value head [N, H, size, dk], from [N, size, 2 Hk dk]."""
    shape = inputs.shape
    heads = raw.unflatten(2, (2, shape.key_heads, shape.key_width)).permute(2, 0, 3, 1, 4)
    units = heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    queries, keys = units.repeat_interleave(shape.value_heads // shape.key_heads, 2)
    return queries * shape.key_width**-0.5, keys


def _slots(inputs: RuleInputs, rows: Tensor) -> Tensor:
    """[C, H, X] -> [N, H, size, X]; zeros for padding."""
    tokens = inputs.tokens.long()
    slots = rows.float()[tokens.clamp(min=0)].masked_fill((tokens < 0)[:, None, None], 0)
    return slots.unflatten(0, (-1, inputs.size)).transpose(1, 2)


def _collected(inputs: RuleInputs, slots: Tensor) -> Tensor:
    """[N, H, size, X] -> [C, H, X]."""
    inside = inputs.tokens >= 0
    rows = slots.transpose(1, 2).flatten(0, 1)
    return torch.empty(len(inputs.decay), *rows.shape[1:]).index_copy_(0, inputs.tokens[inside].long(), rows[inside])


def _numbers(inputs: RuleInputs, slots: Tensor) -> Tensor:
    """[N, H, size] -> [C, H]."""
    return _collected(inputs, slots[..., None]).squeeze(-1)


def _initial(inputs: RuleInputs, states: Tensor) -> Tensor:
    """[N, H, dk, dv]."""
    outside = states[:0] if inputs.outside is None else inputs.outside
    rows = torch.cat([states.nan_to_num(), outside, states.new_zeros(1, *states.shape[1:])])
    numbers = inputs.initial.long()
    return rows[torch.where(numbers < -1, len(states) - 2 - numbers, numbers)]
