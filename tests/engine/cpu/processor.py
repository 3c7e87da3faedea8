"""What tests of compiled functions need of the processor, and how many of its cores PyTorch has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tinsmith.engine.cpu.instructions import has_pair_products

needs_pairs = pytest.mark.skipif(
    not has_pair_products(torch.device("cpu"), torch.bfloat16), reason="needs AVX512-BF16, no AMX, and Numba"
)


@contextmanager
def pytorch_threads(count: int) -> Iterator[None]:
    """Within the context, PyTorch computes with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
