"""Many tenants in one pass do not make Python wait for the device, and share their launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.device import tenants


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("lengths", [[16] * 8, [3, 1, 4, 1, 5, 9, 2, 6]], ids=["equal", "unequal"])
def test_tenants_are_never_read_by_the_host(stand_in: Any, lengths: list[int], grouped: bool):
    counts = stand_in(tenants.counts_of_passes, lengths, torch.bfloat16, grouped=grouped)
    assert [reads for _, reads, _ in counts] == [0, 0]


@pytest.mark.parametrize("grouped", [False, True])
def test_launches_are_constant_in_tenants(stand_in: Any, grouped: bool):
    dtype = torch.bfloat16 if grouped else torch.float32
    few, many = (stand_in(tenants.counts_of_passes, [16] * count, dtype, grouped=grouped) for count in (4, 64))
    assert few == many


def test_groups_of_other_lengths_need_no_more_launches(stand_in: Any):
    two, many = (
        stand_in(tenants.counts_of_passes, lengths, torch.bfloat16, grouped=True)
        for lengths in ([300, 7], [1 + number % 40 for number in range(1000)])
    )
    assert two == many
    single = stand_in(tenants.counts_of_passes, [300], torch.bfloat16, grouped=True)
    assert many[1][0] <= single[1][0] + 8


def test_batches_are_few_whatever_the_order_of_lengths(stand_in: Any):
    sorted_, mixed = (
        stand_in(tenants.counts_of_passes, lengths, torch.float32)
        for lengths in (sorted([2, 16, 40] * 16), [2, 16, 40] * 16)
    )
    assert mixed[0][0] <= sorted_[0][0] + 4 * 9  # rows that are not neighbours are gathered, and added apart
    assert mixed[0][1] == 0


def test_same_tenants_upload_nothing_again(stand_in: Any):
    first, second = stand_in(tenants.counts_of_passes, [3, 1, 4], torch.bfloat16, grouped=True)
    assert first[2] == 1
    assert second[2] == 0
    assert second[0] < first[0]


@pytest.mark.parametrize("separate", [False, True])
def test_experts_cost_the_same_whatever_their_number(stand_in: Any, separate: bool):
    few, many = (stand_in(tenants.counts_of_experts, *numbers, separate=separate) for numbers in ((4, 2), (32, 20)))
    assert few.launches == many.launches
    assert few.reads.total() == many.reads.total() == 0
    assert many.uploads.total() == few.uploads.total() <= 2


def test_tokens_without_adapter_are_a_group_of_experts(stand_in: Any):
    some, many = (stand_in(tenants.counts_of_experts, 4, 2, before=before) for before in (3, 60))
    assert some.reads.total() == 0
    assert some.launches == many.launches
