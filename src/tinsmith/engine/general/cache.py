"""Rows of transformers' own caches: joined, copied and removed, whatever kinds of layers a model has.

Rows are aligned at their last token: keys and values are padded with zeros on the left, and an attention mask hides
the padding. States of recurrent layers have no length and are concatenated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.errors import Unsupported

_LENGTHS = {"keys": -2, "values": -2, "indexer_keys": 1}
"""Tensors of a layer with one entry for each token: the dimension of the tokens."""
_STATES = ("conv_states", "recurrent_states")
_CONSTANTS = ("_sliding_window_tensor",)


@dataclass(frozen=True, slots=True)
class CachedRows:
    """A cache of some rows that decode together."""

    cache: Any
    lengths: tuple[int, ...]
    """Tokens of each row."""

    @property
    def longest(self) -> int:
        """Tokens that the cache counts, padding of the shorter rows included."""
        return max(self.lengths)

    def mask(self, device: torch.device) -> Tensor:
        """int64 [R, longest + 1]: 1 for the tokens of each row and the one that comes next."""
        columns = torch.arange(self.longest + 1)
        starts = self.longest - torch.tensor(self.lengths)
        return (columns[None] >= starts[:, None]).long().to(device)

    def grown(self, cache: Any) -> CachedRows:
        """The rows after one more token."""
        return CachedRows(cache, tuple(length + 1 for length in self.lengths))


def join(parts: Sequence[tuple[CachedRows, Sequence[int]]]) -> CachedRows:
    """Rows of several caches in one new cache; each part names its rows, of which some may come twice.

    Raises Unsupported for a cache that holds anything this function does not know.
    """
    lengths = tuple(part.lengths[row] for part, rows in parts for row in rows)
    longest = max(lengths)
    first = parts[0][0].cache
    if unknown := [name for name, value in vars(first).items() if name != "layers" and _holds_tensors(value)]:
        raise _unknown(first, unknown)
    cache = copy.copy(first)
    cache.layers = [
        _joined([(part.cache.layers[number], part.longest, list(rows)) for part, rows in parts], longest)
        for number in range(len(first.layers))
    ]
    return CachedRows(cache, lengths)


def copied(part: CachedRows) -> CachedRows:
    """A cache of any kind, copied as a whole."""
    return CachedRows(copy.deepcopy(part.cache), part.lengths)


def _joined(parts: Sequence[tuple[Any, int, list[int]]], longest: int) -> Any:
    """One layer of a joined cache; each part is a layer, the tokens that it counts, and its rows."""
    layer = copy.copy(parts[0][0])
    for name, value in vars(layer).items():
        if name in _LENGTHS and value is not None:
            setattr(layer, name, _joined_tokens(name, parts, _tokens_cached(layer, longest)))
        elif name in _STATES and isinstance(value, dict):
            setattr(layer, name, {key: _joined_states(name, key, parts) for key in value})
        elif name not in _CONSTANTS and _holds_tensors(value):
            raise _unknown(layer, [name])
        elif isinstance(value, dict):
            setattr(layer, name, dict(value))
    if "cumulative_length" in vars(layer):
        layer.cumulative_length = longest
    return layer


def _tokens_cached(layer: Any, longest: int) -> int:
    """Tokens that a layer keeps of the longest row."""
    window = vars(layer).get("sliding_window")
    return longest if window is None else min(longest, window - 1)


def _joined_tokens(name: str, parts: Sequence[tuple[Any, int, list[int]]], cached: int) -> Tensor:
    dim = _LENGTHS[name]
    pieces = []
    for layer, _, rows in parts:
        tensor = getattr(layer, name)
        if tensor.numel() == 0:  # a layer without keys of its own
            return tensor
        tensor = tensor[rows]
        size = tensor.shape[dim]
        if size > cached:
            tensor = tensor.narrow(dim, size - cached, cached)
        elif size < cached:
            later_dims = 1 if dim == -2 else tensor.ndim - 1 - dim
            tensor = pad(tensor, (*([0, 0] * later_dims), cached - size, 0))
        pieces.append(tensor)
    return torch.cat(pieces)


def _joined_states(name: str, key: Any, parts: Sequence[tuple[Any, int, list[int]]]) -> Tensor | None:
    states = [(getattr(layer, name)[key], rows) for layer, _, rows in parts]
    return None if states[0][0] is None else torch.cat([state[rows] for state, rows in states])


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_tensors(item) for item in value)


def _unknown(holder: Any, names: Sequence[str]) -> Unsupported:
    return Unsupported(
        f"Rows of a {type(holder).__name__} cannot decode together: it holds {', '.join(names)}.",
        "Its rows decode one at a time.",
    )
