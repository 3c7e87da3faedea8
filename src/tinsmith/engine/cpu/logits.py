"""The products of the output head as a compiled function: float32 results, of factors that are float32 or bfloat16 in
pairs, and what adapters add.

PyTorch's products of bfloat16 have bfloat16 results on CPUs, and its float32 products take twice as long. The weights
are laid out once in `panels`, for float32 factors as bfloat16 numbers in words if these represent them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.panels import lay_columns, lay_rows, multiply, multiply_weights
from tinsmith.engine.cpu.primitives import atomic_next, c_function, numbers_of, pointer, void_pointer
from tinsmith.engine.cpu.rows import copy_row
from tinsmith.engine.cpu.tiles import TILE_COLUMNS, data_of, release_amx, set_up_amx

PRODUCT = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("width", "i8"),  # of a hidden state, even
        ("words", "i8"),  # of the vocabulary
        ("hidden", "i8"),  # address of [rows, width]
        ("weights", "i8"),  # address of panels
        ("storage", "i8"),  # what these are: `panels.AS_FACTORS`, BFLOAT16 or FLOAT16
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


NARROW_ROWS = 32
"""Rows of narrow that are computed at a time."""


@njit(inline="always")
def multiply_span(
    outputs: Any, first: Any, line: Any, product: Any, hidden: Any, panel: Any, span: Any, factors: Any
) -> None:
    """The logits of a panel for the rows of a span."""
    width, rank, rows, place = product.width, span.rank, span.stop - span.start, first + span.start * line
    multiply_weights(outputs, place, line, hidden, span.start * width, width, product.weights, product.storage,
                     panel * TILE_COLUMNS * width, width, rows, 0)  # fmt: skip
    if rank:
        words = min(TILE_COLUMNS, product.words - panel * TILE_COLUMNS)
        lay_columns(factors, 0, pointer(np.float64(span.b)), panel * TILE_COLUMNS * rank, rank, rank, words)
        multiply(outputs, place, line, pointer(np.float64(span.narrow)), 0, rank, factors, 0, rank, np.float32(1), rows,
                 1)  # fmt: skip


@cache
def logits_function(kind: str) -> Any:
    """A C function of a pointer to a PRODUCT, which lives as long as this object: fills the logits."""
    number, dtype = numbers_of(kind)

    @c_function
    def fill_logits(argument):
        set_up_amx(dtype)
        product = carray(argument, 1, PRODUCT)[0]
        rows, words, hidden = product.rows, product.words, pointer(number(product.hidden))
        logits = pointer(np.float64(product.logits))
        spans = carray(void_pointer(product.span_table), product.spans, SPAN)
        factors = np.zeros(product.most_rank * TILE_COLUMNS, np.float32)
        rest = np.empty(rows * TILE_COLUMNS if words % TILE_COLUMNS else 0, np.float32)
        panels = (words + TILE_COLUMNS - 1) // TILE_COLUMNS
        start = atomic_next(argument) * PART_PANELS
        while start < panels:
            for panel in range(start, min(start + PART_PANELS, panels)):
                first = panel * TILE_COLUMNS
                if first + TILE_COLUMNS <= words:
                    for span in spans:
                        multiply_span(logits, first, words, product, hidden, panel, span, data_of(factors))
                else:
                    for span in spans:
                        multiply_span(data_of(rest), 0, TILE_COLUMNS, product, hidden, panel, span, data_of(factors))
                    for row in range(rows):
                        copy_row(logits, first + row * words, data_of(rest), row * TILE_COLUMNS, np.float32(1),
                                 words - first)  # fmt: skip
            start = atomic_next(argument) * PART_PANELS
        release_amx(dtype)

    return fill_logits


@cache
def narrow_function(kind: str) -> Any:
    """A C function of a pointer to a PRODUCT, which lives as long as this object: fills narrow of the spans."""
    number, _ = numbers_of(kind)

    @c_function
    def fill_narrow(argument):
        product = carray(argument, 1, PRODUCT)[0]
        width, hidden = product.width, pointer(number(product.hidden))
        spans = carray(void_pointer(product.span_table), product.spans, SPAN)
        factors, inputs = np.zeros(width * TILE_COLUMNS, np.float32), np.empty(NARROW_ROWS * width, np.float32)
        outputs = np.empty(NARROW_ROWS * TILE_COLUMNS, np.float32)
        part = atomic_next(argument)
        while part < product.spans:
            span = spans[part]
            narrow, rank = pointer(np.float64(span.narrow)), span.rank
            for first in range(0, rank, TILE_COLUMNS):
                columns = min(TILE_COLUMNS, rank - first)
                lay_columns(data_of(factors), 0, pointer(np.float64(span.a)), first * width, width, width, columns)
                for row in range(span.start, span.stop, NARROW_ROWS):
                    rows = min(NARROW_ROWS, span.stop - row)
                    copy_row(data_of(inputs), 0, hidden, row * width, np.float32(1), rows * width)
                    multiply(data_of(outputs), 0, TILE_COLUMNS, data_of(inputs), 0, width, data_of(factors), 0, width,
                             np.float32(span.scale), rows, 0)  # fmt: skip
                    for r in range(rows):
                        copy_row(narrow, (row - span.start + r) * rank + first, data_of(outputs), r * TILE_COLUMNS,
                                 np.float32(1), columns)  # fmt: skip
            part = atomic_next(argument)

    return fill_narrow


BACKWARD = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("width", "i8"),  # of a hidden state, a multiple of TILE_COLUMNS
        ("words", "i8"),  # of the vocabulary, even where bfloat16 is multiplied
        ("parts", "i8"),  # PARTS
        ("logit_grads", "i8"),  # address of [rows, words]
        ("weights", "i8"),  # address of [words, width]
        ("sums", "i8"),  # address of float32 [parts, rows, width], zeros
    ]
)
"""What the function gets a pointer to."""
PARTS = 8
"""Parts of the vocabulary: at most so many threads compute."""
DEPTH = 256
"""Words that are multiplied at a time: their weights stay in a core's cache for all rows."""


@cache
def backward_function(kind: str) -> Any:
    """A C function of a pointer to a BACKWARD, which lives as long as this object: adds the products of gradients of
    logits with the weights of each part of the vocabulary."""
    number, dtype = numbers_of(kind)

    @c_function
    def multiply_back(argument):
        set_up_amx(dtype)
        call = carray(argument, 1, BACKWARD)[0]
        rows, width, words = call.rows, call.width, call.words
        grads, weights = pointer(number(call.logit_grads)), pointer(number(call.weights))
        sums = pointer(np.float64(call.sums))
        panel, chunks = np.empty(DEPTH * TILE_COLUMNS, dtype), (words + DEPTH - 1) // DEPTH
        part = atomic_next(argument)
        while part < call.parts:
            own = part * rows * width
            for chunk in range(chunks * part // call.parts, chunks * (part + 1) // call.parts):
                first = chunk * DEPTH
                depth = min(DEPTH, words - first)
                for column in range(0, width, TILE_COLUMNS):
                    lay_rows(data_of(panel), 0, TILE_COLUMNS, weights, first * width + column, width, depth,
                             TILE_COLUMNS)  # fmt: skip
                    multiply(sums, own + column, width, grads, first, words, data_of(panel), 0, depth, np.float32(1),
                             rows, 1)  # fmt: skip
            part = atomic_next(argument)
        release_amx(dtype)

    return multiply_back
