"""What tests of compiled functions need of the processor."""

from __future__ import annotations

import pytest
import torch

from tinsmith.engine.cpu.instructions import has_pair_products

needs_pairs = pytest.mark.skipif(
    not has_pair_products(torch.device("cpu"), torch.bfloat16), reason="needs AVX512-BF16, no AMX, and Numba"
)
