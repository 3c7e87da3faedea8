"""Which tensors the compiled loops compute, and how they are passed to them. Imports no Numba."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger(__name__)

KINDS: dict[torch.dtype, type[float] | type[int]] = {torch.float32: float, torch.bfloat16: int}
"""What an address is for a loop, by the dtype of the numbers there."""


def loops_on(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """`engine.cpu.loops` for tensors of this dtype on this device; None where they are not computed by loops."""
    if device.type != "cpu" or dtype not in KINDS or not find_spec("numba"):  # it is not ported to all processors
        return None
    try:
        from tinsmith.engine.cpu import loops  # Numba takes 0.3 seconds
    except Exception:
        log.warning("Compiled loops do not work here: training and sampling are slower without them.", exc_info=True)
        return None
    return loops


def address(tensor: Tensor) -> float:
    """The address of a tensor's numbers for a loop: a float if they are float32, an int if they are bfloat16.

    The types of its arguments choose a loop's machine code, and Python's own are the fastest to recognize. A double
    holds an address of up to 53 bits, and those of programs have at most 48 unless they ask for more.
    """
    return KINDS[tensor.dtype](tensor.data_ptr())
