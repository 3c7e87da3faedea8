"""A step's attention: each row over its own past, and what several begin with read once for all of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.engine.test_cache import SHAPE, read
from tinsmith.engine.cache import Cache, Row
from tinsmith.engine.decoding import Cached
from tinsmith.engine.prefixes import Found, Run


def compare(rows: list[Row], pasts: list[Tensor]) -> None:
    """One step of two layers against the definition; `pasts` [1, heads, N, width] are the rows' keys and values."""
    query, new = torch.randn(1, 4, len(rows), 4), torch.randn(1, 2, len(rows), 4)
    lengths = [row.length for row in rows]
    context = Cached(rows)
    for layer in range(2):
        found = context.attend(layer, query, new, new, scale=0.5)
        for number, past in enumerate(pasts):
            keys = torch.cat([past, new[:, :, number : number + 1]], dim=2).repeat_interleave(2, dim=1)
            scores = (query[:, :, number : number + 1] @ keys.transpose(2, 3) * 0.5).softmax(dim=-1)
            torch.testing.assert_close(found[:, number], (scores @ keys)[:, :, 0])
    context.advance()
    assert [row.length for row in rows] == [length + 1 for length in lengths]


def test_a_step_looks_at_the_row_s_own_past_and_its_new_token() -> None:
    torch.manual_seed(0)
    cache = Cache(SHAPE)
    pasts = [torch.randn(1, 2, length, 4) for length in (3, 200, 7)]
    compare([cache.insert(read([(past, past)] * 2), past.shape[2]) for past in pasts], pasts)


def test_rows_that_begin_with_the_same_read_it_in_place() -> None:
    torch.manual_seed(0)
    cache = Cache(SHAPE)
    one, two, three = (torch.randn(1, 2, length, 4) for length in (50, 30, 9))
    runs = [Run(np.zeros(len(part[0, 0]), np.int32), *[part.expand(2, -1, -1, -1)] * 2, None, 0) for part in (one, two)]
    both, half = Found(((runs[0], 50), (runs[1], 30))), Found(((runs[0], 20),))
    rows = [cache.open(both, 64), cache.insert(read([(three, three)] * 2), 64), cache.open(half, 64)]
    rows += [cache.open(both, 64), cache.open(half, 128)]
    assert [row.position for row in rows] == [80, 9, 20, 80, 20]
    pasts = [torch.cat([one, two], dim=2), three, one[:, :, :20], torch.cat([one, two], dim=2), one[:, :, :20]]
    compare(rows, pasts)
    rows = [cache.ensure(row) for row in rows]
    assert [row.position for row in rows] == [81, 10, 21, 81, 21]
