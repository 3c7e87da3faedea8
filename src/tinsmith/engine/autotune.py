"""What is set for the hardware that a base model stands on: how products round, how matrices are ordered, and what
is compiled beforehand.

Which device and dtype there are to choose from is `models`' business; which attention kernel, `attention`'s.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.config import PassTokens
from tinsmith.engine.lora import adapter, linear
from tinsmith.engine.lora.linear import LoraLinear
from tinsmith.engine.model import attention, flex_attention, packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.model.memory import free_bytes

log = logging.getLogger(__name__)

SHARE = 4
"""One part in so many of the free memory may go to ordered matrices."""


def round_products(dtype: torch.dtype) -> None:
    """The head's float32 products, for the whole process.

    Where the base is bfloat16, so are the values that are multiplied: CPUs may multiply as bfloat16 and GPUs as TF32,
    which holds bfloat16 exactly; both sum as float32.
    """
    narrow = dtype == torch.bfloat16
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if narrow else "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.fp32_precision = "tf32" if narrow else "ieee"


def order(base: BaseModel, free: int) -> None:
    """On a CPU, bring the matrices of an adapted base into the order that products like to read, where the room for
    them a second time is a small part of the `free` bytes; float32 ones with AVX-512 alone, for with AVX2 a pass is
    1.05 to 1.1 times as fast without."""
    if base.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return
    products = [module.product for module in base.model.modules() if isinstance(module, LoraLinear)]
    if sum(one.shape.numel() * one.dtype.itemsize for one in products) * SHARE <= free:
        for one in products:
            one.order()


def warm(base: BaseModel) -> None:
    """On a GPU, compile attention forward and backward now, so that no request waits for it."""
    if not flex_attention.suits(base.dtype, base.device):
        return
    log.info("Compiling attention for %s: up to a minute", torch.cuda.get_device_name(base.device))
    length = min(2 * flex_attention.BLOCK, base.card.context_length)
    tokens = np.arange(length, dtype=np.int32) % base.card.vocab_size
    for rows in (
        [tokens],
        [tokens, tokens[: length // 2 + 1][::-1]],
    ):  # two lengths, since the first may be taken as fixed
        forest = packing.pack([packing.Row(key=key, adapter=0, tokens=row) for key, row in enumerate(rows)])
        ids, places = (torch.as_tensor(one, device=base.device) for one in (forest.tokens, forest.positions))
        for learns in (True, False):
            with torch.set_grad_enabled(learns):
                hidden = base.hidden(ids, places, attention.packed(forest, base.dtype, base.device))
                if learns:
                    hidden.float().sum().backward()


"""One part in so many of the free memory."""
STEP, LEAST = 128, 256
MOST = {"cpu": 1024, "cuda": 8192}
"""More gains nothing on a CPU, whose products are as fast with fewer rows; a GPU wants many at once."""
TRIED = 64
"""Tokens of the small pass."""


def chosen(wanted: PassTokens, base: BaseModel, router: linear.Router) -> int:
    """The number itself, or what fits; `base` is adapted, and its layers are the ones that will train."""
    if wanted != "auto":
        return wanted
    return fitting(_free(base.device), kept_bytes(base, router), MOST[base.device.type])


def fitting(free: int, each: float, most: int) -> int:
    """Tokens of `each` bytes that fit the share of `free`: whole steps, within the bounds."""
    return min(max(int(free / SHARE / each) // STEP * STEP, LEAST), most)


def kept_bytes(base: BaseModel, router: linear.Router) -> float:
    """What the backward of one token keeps, in the layers and in the head."""
    layout = linear.layout_for(base, LoraSpec(rank=8, seed=0, train_unembed=False))
    flat = layout.initial().to(base.device)
    weights = adapter.weights_of(layout, flat, base.dtype)
    weights.gradients = layout.pairs(flat)  # nothing is added to them: there is no backward
    count = min(TRIED, base.card.context_length)
    forest = packing.pack(
        [packing.Row(key=0, adapter=0, tokens=np.arange(count, dtype=np.int32) % base.card.vocab_size)]
    )
    stored = {one.untyped_storage().data_ptr() for one in (*base.model.parameters(), base.head, *_tensors(weights))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        router.using(adapter.place(forest.spans, [weights])),
    ):
        hidden = base.hidden(
            torch.as_tensor(forest.tokens, device=base.device),
            torch.as_tensor(forest.positions, device=base.device),
            attention.packed(forest, base.dtype, base.device),
        )
    del hidden  # until here it held all that was kept, so that no place in memory was counted for two
    body = sum(size for place, size in kept.items() if place not in stored)
    return body / count + base.card.vocab_size * base.dtype.itemsize


def _tensors(weights: adapter.Weights) -> list[Tensor]:
    return [one for pair in weights.pairs.values() for one in (pair.a, pair.b)]


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
