"""What is set for the hardware that a base model stands on: how products round, how matrices are ordered, and what
is compiled beforehand.

Which device and dtype there are to choose from is `models`' business; which attention kernel, `attention`'s.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from tinsmith.engine import attention, batch, flex
from tinsmith.engine.lora import LoraLinear
from tinsmith.engine.models import BaseModel

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
    if not flex.suits(base.dtype, base.device):
        return
    log.info("Compiling attention for %s: up to a minute", torch.cuda.get_device_name(base.device))
    length = min(2 * flex.BLOCK, base.card.context_length)
    tokens = np.arange(length, dtype=np.int32) % base.card.vocab_size
    for rows in (
        [tokens],
        [tokens, tokens[: length // 2 + 1][::-1]],
    ):  # two lengths, since the first may be taken as fixed
        forest = batch.pack([batch.Row(key=key, adapter=0, tokens=row) for key, row in enumerate(rows)])
        ids, places = (torch.as_tensor(one, device=base.device) for one in (forest.tokens, forest.positions))
        for learns in (True, False):
            with torch.set_grad_enabled(learns):
                hidden = base.hidden(ids, places, attention.packed(forest, base.dtype, base.device))
                if learns:
                    hidden.float().sum().backward()
