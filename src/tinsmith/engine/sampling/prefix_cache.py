"""Prefix cache: keys and values of earlier prompts and samples, looked up by their tokens.

It also stores the last hidden state of each prompt, so that a repeated prompt needs no forward pass and gives the same
numbers to the bit.

There is one radix tree for each scope (a generation of a version and a space), since nothing may be shared across
scopes. A node holds a run of tokens and hangs on its parent at the token where it leaves it, which may be in the
middle of the parent, so no node is ever split and no token is stored twice. The least recently used node is evicted
first; a parent counts as used after its children, so that node is always a leaf.

Running sequences have cache rows of their own (`kv_cache`), which are copied from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

PrefixScope = tuple[str, int, str]
"""Version name (empty: the base model), generation of that name, and space."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """Tokens int32 [N] and their keys and values [layers, heads, N, width], after `offset` tokens of the parent."""

    tokens: np.ndarray
    keys: Tensor
    values: Tensor
    parent: PrefixNode | None
    offset: int
    children: dict[tuple[int, int], PrefixNode] = field(default_factory=dict)
    """By the offset at which they leave this node and their first token."""
    last_hidden: dict[int, Tensor] = field(default_factory=dict)
    """Last hidden states [D] of the prompts that end in this node, by the number of its tokens that they cover."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached beginning of a prompt: nodes along a path and the number of tokens that match in each."""

    path: tuple[tuple[PrefixNode, int], ...] = ()
    last_hidden: Tensor | None = None
    """Last hidden state [D], if the match is a whole prompt that was prefilled before."""

    @property
    def length(self) -> int:
        return sum(count for _, count in self.path)


KVReader = Callable[[int], tuple[Tensor, Tensor]]
"""Returns copies of a sequence's keys and values [layers, heads, N, width] from a position on."""


class PrefixCache:
    """The trees of all scopes; `tokens` is the number of tokens in their nodes."""

    def __init__(self) -> None:
        self.tokens = 0
        self._roots: dict[PrefixScope, dict[int, PrefixNode]] = {}
        """Nodes without a parent, by their first token."""
        self._lru: OrderedDict[int, tuple[PrefixScope, PrefixNode]] = OrderedDict()
        """By the node's identity, least recently used first."""

    def match(self, scope: PrefixScope, tokens: np.ndarray, max_tokens: int) -> PrefixMatch:
        """The longest cached prefix of `tokens` (int32 [N]), cut to `max_tokens`."""
        path, remaining = [], max_tokens
        for node, count in self._walk(scope, tokens):
            path.append((node, min(count, remaining)))
            remaining -= path[-1][1]
            if not remaining:
                break
        return PrefixMatch(tuple((node, count) for node, count in path if count))

    def match_prompt(self, scope: PrefixScope, tokens: np.ndarray) -> PrefixMatch | None:
        """The whole prompt with its last hidden state, or None if it was not prefilled before."""
        path = self._walk(scope, tokens)
        if sum(count for _, count in path) < len(tokens):
            return None
        node, count = path[-1]
        return PrefixMatch(tuple(path), node.last_hidden[count]) if count in node.last_hidden else None

    def add_last_hidden(self, scope: PrefixScope, tokens: np.ndarray, last_hidden: Tensor) -> None:
        """Store a prompt's last hidden state [D], if the prompt itself is cached."""
        path = self._walk(scope, tokens)
        if sum(count for _, count in path) == len(tokens):
            node, count = path[-1]
            node.last_hidden.setdefault(count, last_hidden.clone())

    def add(self, scope: PrefixScope, tokens: np.ndarray, read: KVReader) -> None:
        """Store the part of `tokens` (int32 [N]) that is not cached yet; `read` gives its keys and values."""
        path = self._walk(scope, tokens)
        matched = sum(count for _, count in path)
        if matched < len(tokens):
            parent, offset = path[-1] if path else (None, 0)
            node = PrefixNode(tokens[matched:].copy(), *read(matched), parent, offset)
            if parent is None:
                self._roots.setdefault(scope, {})[int(tokens[0])] = node
            else:
                parent.children[offset, int(tokens[matched])] = node
            self.tokens += len(node.tokens)
            self._lru[id(node)] = (scope, node)
            path.append((node, len(node.tokens)))
        self.touch(PrefixMatch(tuple(path)))

    def touch(self, match: PrefixMatch) -> None:
        """Mark the nodes of a match as used now."""
        for node, _ in reversed(match.path):
            self._lru.move_to_end(id(node))

    def evict_first(self, match: PrefixMatch) -> None:
        """Put the nodes of a match first in eviction order, except those that other sequences continue.

        For a prompt that a running sequence has copied to its own row: the sequence adds it again when it ends.
        """
        copied: list[PrefixNode] = []
        for node, _ in reversed(match.path):
            if any(child not in copied for child in node.children.values()):
                break  # another sequence goes through this node
            copied.append(node)
        for node in reversed(copied):
            self._lru.move_to_end(id(node), last=False)

    def shrink(self, max_tokens: int) -> None:
        """Evict nodes until they hold at most `max_tokens`."""
        while self.tokens > max(max_tokens, 0):
            _, (scope, node) = self._lru.popitem(last=False)
            self.tokens -= len(node.tokens)
            if node.parent is not None:
                del node.parent.children[node.offset, int(node.tokens[0])]
                continue
            del self._roots[scope][int(node.tokens[0])]
            if not self._roots[scope]:
                del self._roots[scope]

    def drop_version(self, version: str) -> None:
        """Drop the trees of a version, in all generations and spaces."""
        for scope in [scope for scope in self._roots if scope[0] == version]:
            del self._roots[scope]
        for key in [key for key, (scope, _) in self._lru.items() if scope[0] == version]:
            _, node = self._lru.pop(key)
            self.tokens -= len(node.tokens)

    def _walk(self, scope: PrefixScope, tokens: np.ndarray) -> list[tuple[PrefixNode, int]]:
        """The nodes along `tokens`, each with the number of its tokens that match."""
        path: list[tuple[PrefixNode, int]] = []
        position = 0
        node = self._roots.get(scope, {}).get(int(tokens[0])) if len(tokens) else None
        while node is not None:
            count = _common_length(node.tokens, tokens[position:])
            path.append((node, count))
            position += count
            node = node.children.get((count, int(tokens[position]))) if position < len(tokens) else None
        return path


def _common_length(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix of two token rows."""
    length = min(len(left), len(right))
    differences = np.flatnonzero(left[:length] != right[:length])
    return int(differences[0]) if differences.size else length
