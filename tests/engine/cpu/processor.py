"""What tests of compiled functions need of the processor."""

from __future__ import annotations

import pytest
import torch

from tinsmith.engine.cpu.instructions import has_pair_products, panel_kind

CPU = torch.device("cpu")
needs_pairs = pytest.mark.skipif(not has_pair_products(CPU, torch.bfloat16), reason="needs AVX512-BF16 and Numba")
needs_panels = pytest.mark.skipif(panel_kind(CPU, torch.float32) is None, reason="needs x86-64 and Numba")
each_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=needs_panels), pytest.param(torch.bfloat16, marks=needs_pairs)],
    ids=["float32", "bfloat16"],
)
"""Of compiled products."""
each_kind = pytest.mark.parametrize("kind", ["float32", "bfloat16", pytest.param("pairs", marks=needs_pairs)])
"""Of compiled attention, an `instructions.Kind`."""
