"""Compiled functions in the threads of PyTorch's OpenMP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.primitives import atomic_next, void_pointer

numba = pytest.importorskip("numba")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_part_is_computed_once(threads: int) -> None:
    @numba.cfunc("void(voidptr)", nopython=True)
    def count(argument):
        numbers = numba.carray(argument, 3, np.int64)
        results = numba.carray(void_pointer(numbers[2]), numbers[1], np.int64)
        part = atomic_next(argument)
        while part < numbers[1]:
            results[part] += part + 1
            part = atomic_next(argument)

    results = np.zeros(1000, np.int64)
    argument = np.array([0, len(results), results.ctypes.data])
    openmp.run(count, argument.ctypes.data, threads)
    np.testing.assert_array_equal(results, np.arange(1, 1001))


def test_pytorch_brings_its_threads() -> None:
    brought = list((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    assert (openmp._library() is not None) == bool(brought)
