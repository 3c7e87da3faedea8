"""Many tenants in one pass do not make Python wait for the device, and share their launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.device import tenants


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[16] * 8, [3, 1, 4, 1, 5, 9, 2, 6]], ids=["equal", "unequal"])
def test_tenants_are_never_read_by_the_host(stand_in: Any, lengths: list[int], dtype: torch.dtype):
    _, reads = stand_in(tenants.counts_of_pass, lengths, dtype)
    assert reads == 0


def test_launches_are_constant_in_tenants(stand_in: Any):
    few, many = (stand_in(tenants.counts_of_pass, [16] * count, torch.float32)[0] for count in (4, 64))
    assert few == many
