"""The products of the output head as a compiled function: bfloat16 factors, float32 results, and what adapters add.

PyTorch's products of bfloat16 have bfloat16 results on CPUs, and its float32 products take twice as long. The weights
are laid out once: panels of 32 tokens of the vocabulary, with the numbers of a pair side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.pairs import PANEL_LINE, lay_rows, multiply_pairs
from tinsmith.engine.cpu.primitives import atomic_next, c_function, load, pointer, store, void_pointer
from tinsmith.engine.cpu.rows import copy_row
from tinsmith.engine.cpu.tiles import PAIR_COLUMNS, PAIR_ROWS, data_of, product_tile, transpose_block
from tinsmith.engine.cpu.vectors import LANES

PRODUCT = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("width", "i8"),  # of a hidden state, even
        ("words", "i8"),  # of the vocabulary
        ("hidden", "i8"),  # address of bfloat16 [rows, width]
        ("weights", "i8"),  # address of bfloat16 [panels, width / 2, PAIR_COLUMNS, 2]
        ("logits", "i8"),  # address of float32 [rows, words]
        ("spans", "i8"),
        ("span_table", "i8"),  # address of SPAN [spans], which follow each other from row 0 on
        ("most_rank", "i8"),
    ]
)
"""What the function gets a pointer to."""
SPAN = np.dtype(
    [
        ("start", "i8"),
        ("stop", "i8"),
        ("rank", "i8"),  # 0: without an adapter
        ("scale", "f8"),
        ("a", "i8"),  # address of float32 [rank, width]
        ("b", "i8"),  # address of float32 [words, rank]
        ("narrow", "i8"),  # address of float32 [stop - start, rank]: s A x
    ]
)
"""Rows with one adapter."""
PART_PANELS = 8
"""Panels that a thread computes at a time: of few rows, it should read long runs of memory."""


@njit(inline="always")
def transpose(target: Any, numbers: Any, start: Any, rows: Any, columns: Any) -> None:
    """target[c PAIR_COLUMNS + r] = numbers[start + r columns + c]."""
    whole_rows, whole_columns = rows - rows % LANES, columns - columns % LANES
    for row in range(0, whole_rows, LANES):
        for column in range(0, whole_columns, LANES):
            transpose_block(
                target, column * PAIR_COLUMNS + row, PAIR_COLUMNS, numbers, start + row * columns + column, columns
            )
    for row in range(rows):
        for column in range(whole_columns if row < whole_rows else 0, columns):
            store(target, column * PAIR_COLUMNS + row, load(numbers, start + row * columns + column))


@njit(inline="always")
def multiply_span(
    outputs: Any, first: Any, line: Any, product: Any, hidden: Any, weights: Any, panel: Any, span: Any, factors: Any
) -> None:
    """The logits of a panel for the rows of a span."""
    width, rank, rows, place = product.width, span.rank, span.stop - span.start, first + span.start * line
    multiply_pairs(outputs, place, line, hidden, span.start * width, width, 2, weights, panel * PAIR_COLUMNS * width,
                   PANEL_LINE, width, np.float32(1), rows, 0)  # fmt: skip
    if rank:
        words = min(PAIR_COLUMNS, product.words - panel * PAIR_COLUMNS)
        transpose(factors, pointer(np.float64(span.b)), panel * PAIR_COLUMNS * rank, words, rank)
        narrow, whole = pointer(np.float64(span.narrow)), rows - rows % PAIR_ROWS
        for row in range(0, whole, PAIR_ROWS):
            product_tile(outputs, place + row * line, line, narrow, row * rank, rank, 1, factors, 0, PAIR_COLUMNS, rank,
                         PAIR_ROWS, True)  # fmt: skip
        for row in range(whole, rows):
            product_tile(outputs, place + row * line, line, narrow, row * rank, rank, 1, factors, 0, PAIR_COLUMNS, rank,
                         1, True)  # fmt: skip


@cache
def logits_function() -> Any:
    """A C function of a pointer to a PRODUCT, which lives as long as this object: fills the logits."""

    @c_function
    def multiply(argument):
        product = carray(argument, 1, PRODUCT)[0]
        rows, words = product.rows, product.words
        hidden, weights = pointer(product.hidden), pointer(product.weights)
        logits, spans = (
            pointer(np.float64(product.logits)),
            carray(void_pointer(product.span_table), product.spans, SPAN),
        )
        factors = np.zeros(product.most_rank * PAIR_COLUMNS, np.float32)
        rest = np.empty(rows * PAIR_COLUMNS if words % PAIR_COLUMNS else 0, np.float32)
        panels = (words + PAIR_COLUMNS - 1) // PAIR_COLUMNS
        start = atomic_next(argument) * PART_PANELS
        while start < panels:
            for panel in range(start, min(start + PART_PANELS, panels)):
                first = panel * PAIR_COLUMNS
                if first + PAIR_COLUMNS <= words:
                    for span in spans:
                        multiply_span(logits, first, words, product, hidden, weights, panel, span, data_of(factors))
                else:
                    for span in spans:
                        multiply_span(
                            data_of(rest), 0, PAIR_COLUMNS, product, hidden, weights, panel, span, data_of(factors)
                        )
                    for row in range(rows):
                        copy_row(logits, first + row * words, data_of(rest), row * PAIR_COLUMNS, np.float32(1),
                                 words - first)  # fmt: skip
            start = atomic_next(argument) * PART_PANELS

    return multiply


@cache
def narrow_function() -> Any:
    """A C function of a pointer to a PRODUCT, which lives as long as this object: fills narrow of the spans. What a row
    gets does not depend on how many rows there are."""

    @c_function
    def fill_narrow(argument):
        product = carray(argument, 1, PRODUCT)[0]
        width, hidden = product.width, pointer(product.hidden)
        spans = carray(void_pointer(product.span_table), product.spans, SPAN)
        factors, inputs = np.zeros(width * PAIR_COLUMNS, np.float32), np.empty(PAIR_ROWS * width, np.float32)
        outputs = np.empty(PAIR_ROWS * PAIR_COLUMNS, np.float32)
        part = atomic_next(argument)
        while part < product.spans:
            span = spans[part]
            narrow, rank = pointer(np.float64(span.narrow)), span.rank
            for first in range(0, rank, PAIR_COLUMNS):
                columns = min(PAIR_COLUMNS, rank - first)
                transpose(data_of(factors), pointer(np.float64(span.a)), first * width, columns, width)
                for row in range(span.start, span.stop, PAIR_ROWS):
                    rows = min(PAIR_ROWS, span.stop - row)
                    copy_row(data_of(inputs), 0, hidden, row * width, np.float32(1), rows * width)
                    product_tile(data_of(outputs), 0, PAIR_COLUMNS, data_of(inputs), 0, width, 1, data_of(factors), 0,
                                 PAIR_COLUMNS, width, PAIR_ROWS, False)  # fmt: skip
                    for r in range(rows):
                        copy_row(narrow, (row - span.start + r) * rank + first, data_of(outputs), r * PAIR_COLUMNS,
                                 np.float32(span.scale), columns)  # fmt: skip
            part = atomic_next(argument)

    return fill_narrow


BACKWARD = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("width", "i8"),  # of a hidden state, a multiple of PAIR_COLUMNS
        ("words", "i8"),  # of the vocabulary, even
        ("parts", "i8"),  # PARTS
        ("logit_grads", "i8"),  # address of bfloat16 [rows, words]
        ("weights", "i8"),  # address of bfloat16 [words, width]
        ("sums", "i8"),  # address of float32 [parts, rows, width], zeros
    ]
)
"""What the function gets a pointer to."""
PARTS = 8
"""Parts of the vocabulary: at most so many threads compute."""
DEPTH = 256
"""Words that are multiplied at a time: their weights stay in a core's cache for all rows."""


@cache
def backward_function() -> Any:
    """A C function of a pointer to a BACKWARD, which lives as long as this object: adds the products of gradients of
    logits with the weights of each part of the vocabulary."""

    @c_function
    def multiply_back(argument):
        call = carray(argument, 1, BACKWARD)[0]
        rows, width, words = call.rows, call.width, call.words
        grads, weights, sums = pointer(call.logit_grads), pointer(call.weights), pointer(np.float64(call.sums))
        panel, chunks = np.empty(DEPTH * PAIR_COLUMNS, np.uint16), (words + DEPTH - 1) // DEPTH
        part = atomic_next(argument)
        while part < call.parts:
            own = part * rows * width
            for chunk in range(chunks * part // call.parts, chunks * (part + 1) // call.parts):
                first = chunk * DEPTH
                depth = min(DEPTH, words - first)
                for column in range(0, width, PAIR_COLUMNS):
                    lay_rows(data_of(panel), 0, PANEL_LINE, weights, first * width + column, width, depth, PAIR_COLUMNS)
                    multiply_pairs(sums, own + column, width, grads, first, words, 2, data_of(panel), 0,
                                   PANEL_LINE, depth, np.float32(1), rows, 1)  # fmt: skip
            part = atomic_next(argument)

    return multiply_back
