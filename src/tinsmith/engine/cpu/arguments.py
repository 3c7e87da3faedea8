"""Tensors as arguments of compiled loops, where there are such loops. Imports no Numba."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

KINDS: dict[torch.dtype, type[float] | type[int]] = {torch.float32: float, torch.bfloat16: int}
"""What an address is for a loop, by the dtype of the numbers there."""


def has_loops(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled loops can compute tensors of this dtype on this device: Numba is where it has been ported to."""
    return device.type == "cpu" and dtype in KINDS and find_spec("numba") is not None


def address(tensor: Tensor) -> float:
    """The address of a tensor's numbers for a loop: a float if they are float32, an int if they are bfloat16.

    The types of its arguments choose a loop's machine code, and Python's own are the fastest to recognize. A double
    holds an address of up to 53 bits, and those of programs have at most 48 unless they ask for more.
    """
    return KINDS[tensor.dtype](tensor.data_ptr())
