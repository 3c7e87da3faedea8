"""Products with matrices in panels, of bfloat16 numbers in pairs, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from numba import njit  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.panels import multiply, multiply_transposed
from tinsmith.engine.cpu.tiles import TILE_COLUMNS, data_of, release_amx, set_up_amx
from tinsmith.engine.cpu.vectors import HAS_PAIRS

torch.cpu._init_amx()  # Linux lets a process use AMX after this
pytestmark = pytest.mark.skipif(not HAS_PAIRS, reason="needs AVX512-BF16")
DEPTHS = [8, 32, 40, 64, 264]
"""Some of which AMX multiplies whole, in part, and not at all."""


@njit(error_model="numpy")
def by_rows(outputs, left, first, left_line, right, depth, factor, rows, adds):  # type: ignore[no-untyped-def]
    set_up_amx(np.uint16)
    multiply(data_of(outputs), 0, TILE_COLUMNS, data_of(left), first, left_line, data_of(right), 0, depth, factor, rows,
             adds)  # fmt: skip
    release_amx(np.uint16)


@njit(error_model="numpy")
def by_columns(outputs, left, first, left_line, right, start, right_line, depth, factor, rows):  # type: ignore[no-untyped-def]
    set_up_amx(np.uint16)
    multiply_transposed(data_of(outputs), 0, TILE_COLUMNS, data_of(left), first, left_line, data_of(right), start,
                        right_line, depth, factor, rows, 0)  # fmt: skip
    release_amx(np.uint16)


def bfloat16(rng: np.random.Generator, *shape: int) -> Any:
    """Normal numbers as bfloat16, by their bits."""
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def numbers(bits: Any) -> Any:
    """The numbers with these bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def in_pairs(matrix: Any) -> Any:
    """A matrix [depth, columns] with each two rows as pairs: [depth / 2, columns, 2], flat."""
    return np.ascontiguousarray(matrix.reshape(len(matrix) // 2, 2, -1).transpose(0, 2, 1)).reshape(-1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 70])
def test_rows_times_panel(depth: int, rows: int):
    rng = np.random.default_rng(depth)
    left, right = bfloat16(rng, rows, depth + 3), bfloat16(rng, depth, TILE_COLUMNS)
    products = numbers(left)[:, 3:] @ numbers(right)
    for factor, adds in ((1.0, 0), (0.37, 0), (0.37, 1)):
        outputs = rng.standard_normal((rows, TILE_COLUMNS)).astype(np.float32)
        expected = factor * products + adds * outputs
        by_rows(
            outputs.reshape(-1), left.reshape(-1), 3, depth + 3, in_pairs(right), depth, np.float32(factor), rows, adds
        )
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-6 * depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_products_of_a_row_do_not_depend_on_the_number_of_rows(depth: int):
    rng = np.random.default_rng(depth)
    left, right = bfloat16(rng, 70, depth), in_pairs(bfloat16(rng, depth, TILE_COLUMNS))

    def outputs(rows: int) -> Any:
        target = np.zeros((rows, TILE_COLUMNS), np.float32)
        by_rows(target.reshape(-1), left[70 - rows :].reshape(-1), 0, depth, right, depth, np.float32(1), rows, 0)
        return target

    whole = outputs(70)
    assert all(np.array_equal(outputs(rows), whole[70 - rows :]) for rows in range(1, 70))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("first", "rows"), [(0, 16), (16, 32), (16, 8), (0, 48)])
def test_columns_times_columns(depth: int, first: int, rows: int):
    rng = np.random.default_rng(depth)
    left, right = bfloat16(rng, depth, 48), bfloat16(rng, depth, 3 * TILE_COLUMNS)
    outputs = np.zeros((rows, TILE_COLUMNS), np.float32)
    by_columns(outputs.reshape(-1), in_pairs(left), first, 48, in_pairs(right), TILE_COLUMNS, 3 * TILE_COLUMNS, depth,
               np.float32(0.5), rows)  # fmt: skip
    expected = 0.5 * numbers(left)[:, first : first + rows].T @ numbers(right)[:, TILE_COLUMNS : 2 * TILE_COLUMNS]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-6 * depth)
