"""Arithmetic on NumPy arrays and on PyTorch's tensors alike: losses run on both.

The batch of a loss that the server computes is in arrays, which give its inputs and its metrics: a client of a server
needs no PyTorch. A loss that is computed here runs on tensors, for its gradient. The functions that losses call (exp,
where, clip, maximum, logaddexp, zeros_like, ...) have the same name and arguments in both libraries; here is what does
not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
"""An array of NumPy, or a tensor of PyTorch. All arrays of one computation are of one library."""


def library_of(values: Array) -> Any:
    """The module whose functions take `values`: numpy or torch."""
    if isinstance(values, np.ndarray | np.generic):
        return np
    import torch  # loaded before, since there is a tensor

    return torch


def without_gradient(values: Array) -> Array:
    """sg(values): the values, as constants."""
    return values if library_of(values) is np else values.detach()


def sums_of_rows(values: Array, sequence: Array, rows: int) -> Array:
    """[rows]: the sum of `values` [T] over the tokens of each row; `sequence` is the row of each token."""
    if (library := library_of(values)) is np:
        return np.bincount(sequence, weights=values, minlength=rows)
    return library.zeros(rows, dtype=values.dtype).index_add(0, sequence, values)


def at_least_one(values: Array) -> Array:
    """The values, or 1 where they are below, as divisors."""
    return library_of(values).clip(values, 1.0, None)
