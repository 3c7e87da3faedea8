"""A decoding step as a fixed sequence of operators on fixed addresses, which a CUDA graph can replay.

What the host knows of each row (position, length, pages, slot of its adapter, rule, uniform number) is copied in before
the step; the token comes from the step before, on the device. Rows are padded to a bucket, and tables to a number of
pages that is a power of two; nothing else of the batch is in the operators.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import PlacedAdapter
from tinsmith.engine.lora.linear import ActiveAdapters
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.capacity import MAX_SEQUENCES
from tinsmith.engine.sampling.device_sampling import RULE_COLUMNS, DrawKind, draw_tokens
from tinsmith.engine.sampling.paged.adapter_slots import AdapterSlots
from tinsmith.engine.sampling.paged.attention import AttendPages, PagedAttention
from tinsmith.engine.sampling.paged.pages import PagedCache

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, *range(8, MAX_SEQUENCES + 1, 8))
"""Rows of a step; more than the last are padded to a multiple of it."""
MIN_TABLE = 8
"""Pages of the narrowest tables."""

MAX_GRAPHS = 96
"""Graphs at a time; the one whose last use is longest ago makes room."""


@dataclass(frozen=True, slots=True)
class Graph:
    """What a function did on the device, to do again."""

    replay: Callable[[], None]
    bytes: int = 0
    """Memory that it took beside that of the graphs before it."""


Capture = Callable[[Callable[[], None]], Graph]


class Column(IntEnum):
    """What the host says of each row; then the columns of its rule."""

    SOURCE = 0
    """Row of the step before whose token is fed; -1: TOKEN is."""
    TOKEN = 1
    POSITION = 2
    PAST = 3
    """Tokens in its pages."""
    SLOT = 4
    GOAL = 5
    """Its uniform number."""


COLUMNS = len(Column) + RULE_COLUMNS


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the operators of a step depend on."""

    rows: int
    pages: int
    kind: DrawKind
    has_adapters: bool

    @classmethod
    def of(cls, rows: int, pages: int, kind: DrawKind, vocabulary: int, *, has_adapters: bool) -> StepShape:
        """The shape for so many rows, of at most so many pages, that draws from so many tokens."""
        bucket = next((size for size in BUCKETS if size >= rows), -(-rows // BUCKETS[-1]) * BUCKETS[-1])
        table = max(MIN_TABLE, 1 << (pages - 1).bit_length())
        likeliest = 1 << (kind.top_logprobs - 1).bit_length() if kind.top_logprobs else 0
        return cls(bucket, table, replace(kind, top_logprobs=min(likeliest, vocabulary)), has_adapters)


class DecodeStep:
    """The step of one base model, with its inputs and results in static tensors."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        active: ActiveAdapters,
        cache: PagedCache,
        attend_pages: AttendPages,
        capture: Capture | None,
    ) -> None:
        self._base, self._head, self._active, self._cache = base, head, active, cache
        self._attend_pages, self._capture = attend_pages, capture
        self.slots = AdapterSlots(base.dtype, base.device)
        self._graphs: dict[StepShape, Graph | None] = {}
        """None: the shape was computed once, which compiles its kernels, and is captured when it comes again."""
        self._graph_bytes = 0
        self._addresses = (0, 0)
        self._previous = self._tokens = self._control = self._tables = self._drawn = torch.empty(0)

    @property
    def bytes(self) -> int:
        """Memory of graphs and adapters."""
        return self._graph_bytes + self.slots.bytes

    def launch(
        self, shape: StepShape, control: np.ndarray, table: np.ndarray, spans: list[PlacedAdapter] | None = None
    ) -> Tensor:
        """Start a step; `control` is float64 [COLUMNS, rows], `table` int32 [rows, pages].

        Returns what `draw_tokens` does, in a tensor that the next step overwrites. With `spans`, adapters serve these
        rows instead of those in slots, and the step is no graph.
        """
        self._cache.copy_pages()
        self._reserve(shape)
        _upload(self._control_of(shape), control)
        _upload(self._tables_of(shape), table)
        source = self._control_of(shape)[Column.SOURCE].long()
        fed = self._previous[source.clamp(min=0)]
        self._tokens[: shape.rows].copy_(torch.where(source < 0, self._control_of(shape)[Column.TOKEN].long(), fed))
        if spans is not None:
            with self._active.using(spans):
                self._compute(shape, spans)
        elif self._capture is None:
            self._compute(shape)
        else:
            self._replay(shape, self._capture)
        return self._drawn_of(shape)

    def release_memory(self) -> None:
        """Drop the graphs and the adapters."""
        self._drop_graphs()
        self.slots.release_memory()

    def _replay(self, shape: StepShape, capture: Capture) -> None:
        if self._addresses != (self._cache.generation, self.slots.generation):
            self._drop_graphs()
            self._addresses = (self._cache.generation, self.slots.generation)
        if shape not in self._graphs:
            self._graphs[shape] = None
            self._compute(shape)
            return
        graph = self._graphs.pop(shape)
        if graph is None:
            try:
                graph = capture(lambda: self._compute(shape))
            except Exception:
                log.warning("A decoding step cannot be a CUDA graph here; it starts its kernels itself.", exc_info=True)
                self._capture = None
                self._drop_graphs()
                self._compute(shape)
                return
            self._graph_bytes += graph.bytes
        self._graphs[shape] = graph  # the last one used is last
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        graph.replay()

    def _drop_graphs(self) -> None:
        self._graphs, self._graph_bytes = {}, 0

    def _compute(self, shape: StepShape, spans: list[PlacedAdapter] | None = None) -> None:
        """The step, from static tensors into static tensors."""
        control = self._control_of(shape)
        context = PagedAttention.of(
            self._cache, self._attend_pages, self._tables_of(shape), control[Column.PAST].long()
        )
        tokens, positions = self._tokens[: shape.rows], control[Column.POSITION].long()
        if spans is not None:
            logits = self._head.logits_under(self._base.hidden(tokens, positions, context), spans)
        elif shape.has_adapters:
            rows = self.slots.rows(control[Column.SLOT].long())
            with self._active.serving([rows]):
                hidden = self._base.hidden(tokens, positions, context)
            logits = self._head.logits_with(hidden, rows.add_to_logits)
        else:
            logits = self._head.logits_under(self._base.hidden(tokens, positions, context), [])
        at = torch.arange(shape.rows, device=tokens.device)
        drawn = draw_tokens(logits, control[len(Column) :], control[Column.GOAL], at, shape.kind)
        self._previous[: shape.rows].copy_(drawn[:, 0])
        self._drawn_of(shape).copy_(drawn)

    def _reserve(self, shape: StepShape) -> None:
        """Static tensors for at least this shape; larger ones have other addresses, so that graphs are made again."""
        rows = max(shape.rows, BUCKETS[-1])
        device = self._base.device
        if len(self._previous) < rows:
            previous = torch.zeros(rows, dtype=torch.int64, device=device)
            previous[: len(self._previous)] = self._previous.to(device)
            self._previous, self._tokens = previous, torch.zeros_like(previous)
            self._control = torch.zeros(rows * COLUMNS, dtype=torch.float64, device=device)
            self._drop_graphs()
        width = _drawn_width(shape)
        for name, size, dtype in (
            ("_tables", rows * shape.pages, torch.int32),
            ("_drawn", rows * width, torch.float64),
        ):
            if len(vars(self)[name]) < size:
                vars(self)[name] = torch.zeros(size, dtype=dtype, device=device)
                self._drop_graphs()

    def _control_of(self, shape: StepShape) -> Tensor:
        return self._control[: COLUMNS * shape.rows].view(COLUMNS, shape.rows)

    def _tables_of(self, shape: StepShape) -> Tensor:
        return self._tables[: shape.rows * shape.pages].view(shape.rows, shape.pages)

    def _drawn_of(self, shape: StepShape) -> Tensor:
        width = _drawn_width(shape)
        return self._drawn[: shape.rows * width].view(shape.rows, width)


def _drawn_width(shape: StepShape) -> int:
    return 2 + 2 * shape.kind.top_logprobs


def _upload(target: Tensor, values: np.ndarray) -> None:
    """Copy into a static tensor; a GPU from page-locked memory, for which nothing waits."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    target.copy_(host.pin_memory() if target.device.type == "cuda" else host, non_blocking=True)


def cuda_capture() -> Capture:
    """Captures CUDA graphs, which share the memory of what is between their operators.

    PyTorch gives up a pool with the last of its graphs, so graphs after that get a new one.
    """
    pool, graphs = torch.cuda.graph_pool_handle(), weakref.WeakSet[torch.cuda.CUDAGraph]()

    def capture(run: Callable[[], None]) -> Graph:
        nonlocal pool
        if not graphs:
            pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # as the capture does: what is reserved then is the graph's
        before = torch.cuda.memory_reserved()
        # Another thread may copy a version to the host at the same time.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        graphs.add(graph)
        return Graph(graph.replay, torch.cuda.memory_reserved() - before)

    return capture
