"""One step of the gated delta rule, for decoding; `chunk_rule` computes the tokens of a pass.

For each head, with the gate a = exp(decay), b = beta and normalized keys and queries:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T        o_t = S_t^T q_t / sqrt(width)

Computed in float32 at least, because the state sums over the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.chunk_rule import NORM_EPS


def unit(heads: Tensor) -> Tensor:
    """Vectors of length 1, in float32 at least."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)


def delta_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Outputs [B, Hv, dv] of one token of each row; updates the states [B, Hv, dk, dv] in place.

    query and key [B, Hk, dk], value [B, Hv, dv], decay (<= 0) and beta [B, Hv]. Value heads that share a key head are
    neighbours.
    """
    groups = value.shape[1] // key.shape[1]
    key = unit(key).repeat_interleave(groups, 1)
    query = unit(query).repeat_interleave(groups, 1) * key.shape[2] ** -0.5
    flat = state.flatten(0, 1)  # [B Hv, dk, dv]
    # Both products read the old state, which is read once: it is most of the memory that a step moves.
    read = torch.bmm(torch.stack([key, query], 2).flatten(0, 1), flat).view(*key.shape[:2], 2, -1)
    fades = decay.to(state.dtype).exp()[..., None]
    change = (value.to(state.dtype) - read[:, :, 0] * fades) * beta.to(state.dtype)[..., None]
    output = read[:, :, 1] * fades + (query * key).sum(-1, keepdim=True) * change
    flat.mul_(fades.view(-1, 1, 1)).baddbmm_(key.flatten(0, 1)[..., None], change.flatten(0, 1)[:, None])
    return output
