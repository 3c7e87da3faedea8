"""KV cache of running sequences in pages of PAGE_TOKENS tokens, on GPUs: every page can be anywhere.

A row is a list of pages and a length. Rows of one prompt share its pages, which are counted by reader; a row that is
about to write into a shared page, the last one of the prompt, gets a copy of it. All pages are in one tensor for each
layer's keys and one for its values, which grow up to a limit and keep their addresses otherwise: CUDA graphs refer to
them. The methods are those of `kv_cache.KVCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engine.model.hybrid.states import RecurrentState
from tinsmith.engine.sampling.capacity import PAGE_TOKENS
from tinsmith.engine.sampling.kv_cache import CacheShape
from tinsmith.engine.sampling.prefill import PrefilledPrompt
from tinsmith.errors import EngineError

FIRST_PAGES = 64
"""Pages of the first allocation."""
UNUSED = 0
"""The page that rows without a sequence write to."""


class CacheFull(EngineError):
    """All pages are in use."""


@dataclass(eq=False, slots=True)
class PagedRow:
    """The row of one sequence: its first `length` tokens are in `pages`, in order."""

    cache: PagedCache
    pages: list[int]
    length: int

    @property
    def position(self) -> int:
        """Position of the sequence's next token."""
        return self.length

    @property
    def capacity(self) -> int:
        """Tokens for which there are pages."""
        return len(self.pages) * PAGE_TOKENS

    def copy_from(self, first: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values from position `first` on: [layers, heads, N, width]."""
        skipped = first // PAGE_TOKENS
        pages = self.cache.index(self.pages[skipped : -(-self.length // PAGE_TOKENS)])
        return tuple(  # type: ignore[return-value]
            torch.stack(
                [
                    layer.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, first % PAGE_TOKENS :]
                    for layer in layers
                ]
            )[:, :, : self.length - first]
            for layers in (self.cache.keys, self.cache.values)
        )


class PagedCache:
    """All pages. `tokens` is how many the rows take, `allocated_tokens` how many there is memory for."""

    states = None
    """Models with recurrent layers have no paged cache."""

    def __init__(self, shape: CacheShape, max_tokens: int) -> None:
        """`max_tokens`: up to how many the memory grows for rows that become longer."""
        self.shape, self._max_pages = shape, max(max_tokens // PAGE_TOKENS, FIRST_PAGES)
        self._readers: list[int] = []
        """Of each page: rows that have it."""
        self._free: list[int] = []
        self._copies: list[tuple[int, int]] = []
        """(from, to): pages to copy before the next write."""
        self.generation = 0
        """Grows when the tensors get other addresses."""
        self.keys: list[Tensor] = []
        """[pages, heads, PAGE_TOKENS, width] of each layer."""
        self.values: list[Tensor] = []
        self._allocate(0)

    @property
    def tokens(self) -> int:
        return max(len(self._readers) - len(self._free) - 1, 0) * PAGE_TOKENS

    @property
    def allocated_tokens(self) -> int:
        return len(self._readers) * PAGE_TOKENS

    def insert(self, prompt: PrefilledPrompt, min_capacity: int = 0, arriving: int = 1) -> PagedRow:
        """A row with a prompt's keys and values. Rows need no capacity in advance."""
        del min_capacity, arriving
        count = -(-prompt.length // PAGE_TOKENS)
        row = PagedRow(self, [self._page(may_exceed=True) for _ in range(count)], prompt.length)
        try:
            self._write(row, prompt)
        except BaseException:
            self.remove(row)
            raise
        return row

    def copy(self, source: PagedRow) -> PagedRow:
        """Another row with the same content, in the same pages until one of the two writes."""
        for page in source.pages:
            self._readers[page] += 1
        return PagedRow(self, list(source.pages), source.length)

    def ensure_space(self, row: PagedRow, remaining: int = 1, *, may_exceed: bool = True) -> PagedRow:
        """The row with space for one more token, in a page of its own.

        Raises CacheFull if there is none, unless the memory `may_exceed` its limit.
        """
        del remaining
        number = row.length // PAGE_TOKENS
        if number == len(row.pages):
            row.pages.append(self._page(may_exceed=may_exceed))
        elif self._readers[row.pages[number]] > 1:
            own = self._page(may_exceed=may_exceed)
            self._copies.append((row.pages[number], own))
            self._release(row.pages[number])
            row.pages[number] = own
        return row

    def copy_pages(self) -> None:
        """Copy the pages of which rows got their own; before anything is written."""
        if self._copies:
            source, target = self.index([page for copy in self._copies for page in copy]).view(-1, 2).T
            for layer in (*self.keys, *self.values):
                layer.index_copy_(0, target, layer.index_select(0, source))
            self._copies = []

    def remove(self, row: PagedRow) -> None:
        """Free a row's pages that no other row has."""
        self.copy_pages()  # a page that is to be copied must not get another content first
        for page in row.pages:
            self._release(page)
        row.pages = []

    def start_state(self, row: PagedRow, state: RecurrentState | None) -> None:
        """There are no states."""

    def state_of(self, row: PagedRow) -> RecurrentState | None:
        """There are no states."""

    def release_memory(self) -> None:
        """Free the memory, if no row is in it."""
        if not self.tokens:
            self._allocate(0)

    def index(self, pages: Sequence[int]) -> Tensor:
        """Numbers of pages on the device."""
        return torch.tensor(pages, dtype=torch.int64, device=self.shape.device)

    def _write(self, row: PagedRow, prompt: PrefilledPrompt) -> None:
        count, shape = len(row.pages), self.shape
        size = (shape.layers, shape.heads, count * PAGE_TOKENS)
        keys, values = (
            torch.zeros(*size, width, dtype=shape.dtype, device=shape.device)
            for width in (shape.key_width, shape.value_width)
        )
        prompt.write(keys, values)
        pages = self.index(row.pages)
        for layers, dense in ((self.keys, keys), (self.values, values)):
            for layer, content in zip(layers, dense.unflatten(2, (count, PAGE_TOKENS)), strict=True):
                layer.index_copy_(0, pages, content.transpose(0, 1))

    def _page(self, *, may_exceed: bool) -> int:
        if not self._free:
            count = len(self._readers)
            if count >= self._max_pages and not may_exceed:
                raise CacheFull("The KV cache has no free page.", "Raise cache_tokens, or sample fewer at a time.")
            larger = max(FIRST_PAGES, min(2 * count, self._max_pages))
            self._allocate(larger if larger > count else count + max(FIRST_PAGES, count // 8))
        page = self._free.pop()
        self._readers[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._readers[page] -= 1
        if not self._readers[page]:
            self._free.append(page)

    def _allocate(self, pages: int) -> None:
        """Make space for `pages` pages in all, layer by layer, so that only one layer is in memory twice."""
        shape, present = self.shape, min(len(self._readers), pages)
        for layers, width in ((self.keys, shape.key_width), (self.values, shape.value_width)):
            layers.extend(torch.empty(0, device=shape.device) for _ in range(shape.layers - len(layers)))
            for number, layer in enumerate(layers):
                size = (pages, shape.heads, PAGE_TOKENS, width)
                larger = torch.empty(*size, dtype=shape.dtype, device=shape.device)
                if present:
                    larger[:present] = layer[:present]
                layers[number] = larger
        self._readers = [*self._readers[:present], *[0] * (pages - present)]
        first = max(present, UNUSED + 1)  # that page is never free
        self._free = [*range(pages - 1, first - 1, -1), *self._free] if pages else []
        self.generation += 1
