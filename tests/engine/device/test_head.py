"""The output head on a GPU: it reads nothing, uploads once, and touches a block's logits few times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.device import head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "tenants", "rows"), [(30, 1, 64), (90, 7, 16)])
def test_head_reads_nothing_and_uploads_once(
    stand_in: Any, dtype: torch.dtype, length: int, tenants: int, rows: int
) -> None:
    reads, uploads, difference = stand_in(head.costs, dtype, length, tenants, rows)
    assert (reads, uploads) == (0, 1)
    assert difference < (1e-5 if dtype == torch.float32 else 1e-2)


def test_bfloat16_head_has_few_passes_and_no_float32_weights(stand_in: Any) -> None:
    """The kernel reads logits once, and once more for probabilities of half their size: 3.5 passes with the product."""
    of_logits, widens_weights = stand_in(head.operators_on_logits, torch.bfloat16, 60)
    assert of_logits == ["aten.mm", "kernel"] * 2  # positions with a gradient, and those without
    assert not widens_weights
