"""How many packed tokens a micro-batch of training takes, where the configuration leaves it to the memory there is.

What the backward keeps of a token is counted and not worked out: once, when a model is loaded, in a small pass under an
adapter. So it holds for whatever modules and kernels are in use. A quarter of the free memory is for that: a row twice
as long goes without recomputing, and adapters, moments and the sampler's cache want room too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import attention, batch, lora
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.config import PassTokens
from tinsmith.engine.memory import free_bytes
from tinsmith.engine.models import BaseModel

SHARE = 4
"""One part in so many of the free memory."""
STEP, LEAST = 128, 256
MOST = {"cpu": 1024, "cuda": 8192}
"""More gains nothing on a CPU, whose products are as fast with fewer rows; a GPU wants many at once."""
TRIED = 64
"""Tokens of the small pass."""


def chosen(wanted: PassTokens, base: BaseModel, router: lora.Router) -> int:
    """The number itself, or what fits; `base` is adapted, and its layers are the ones that will train."""
    if wanted != "auto":
        return wanted
    return fitting(_free(base.device), kept_bytes(base, router), MOST[base.device.type])


def fitting(free: int, each: float, most: int) -> int:
    """Tokens of `each` bytes that fit the share of `free`: whole steps, within the bounds."""
    return min(max(int(free / SHARE / each) // STEP * STEP, LEAST), most)


def kept_bytes(base: BaseModel, router: lora.Router) -> float:
    """What the backward of one token keeps, in the layers and in the head."""
    layout = lora.layout_for(base, LoraSpec(rank=8, seed=0, train_unembed=False))
    flat = layout.initial().to(base.device)
    weights = lora.weights_of(layout, flat, base.dtype)
    weights.gradients = layout.pairs(flat)  # nothing is added to them: there is no backward
    count = min(TRIED, base.card.context_length)
    forest = batch.pack([batch.Row(key=0, adapter=0, tokens=np.arange(count, dtype=np.int32) % base.card.vocab_size)])
    stored = {one.untyped_storage().data_ptr() for one in (*base.model.parameters(), base.head, *_tensors(weights))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        router.using(lora.place(forest.spans, [weights])),
    ):
        hidden = base.hidden(
            torch.as_tensor(forest.tokens, device=base.device),
            torch.as_tensor(forest.positions, device=base.device),
            attention.packed(forest, base.dtype, base.device),
        )
    del hidden  # until here it held all that was kept, so that no place in memory was counted for two
    body = sum(size for place, size in kept.items() if place not in stored)
    return body / count + base.card.vocab_size * base.dtype.itemsize


def _tensors(weights: lora.Weights) -> list[Tensor]:
    return [one for pair in weights.pairs.values() for one in (pair.a, pair.b)]


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
