"""Prefix cache: keys and values of earlier prompts and samples, looked up by their tokens.

An image's tokens are looked up by what it shows (`images.rows.content_ids`), so tokens here are ids that may be
negative.

It also stores the last hidden state of each prompt, so that a repeated prompt needs no forward pass and gives the same
numbers to the bit.

There is one radix tree for each scope (a generation of a version and a space), since nothing may be shared across
scopes. A node holds a run of tokens and hangs on its parent at the token where it leaves it, which may be in the
middle of the parent, so no node is ever split and no token is stored twice. The least recently used node is evicted
first; a parent counts as used after its children, so that node is always a leaf.

The layers of a recurrent model need their state at the end of a prefix, which is known only where it was saved: at the
ends of prompts and of sequences. There a match ends at the last saved state.

Running sequences have cache rows of their own (`kv_cache`), which are copied from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinsmith.engine.model.hybrid.states import RecurrentState

PrefixScope = tuple[str, int, str]
"""Version name (empty: the base model), generation of that name, and space."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """Tokens [N] and their keys and values [layers, heads, N, width], after `offset` tokens of the parent."""

    tokens: np.ndarray
    keys: Tensor
    values: Tensor
    parent: PrefixNode | None
    offset: int
    children: dict[tuple[int, int], PrefixNode] = field(default_factory=dict)
    """By the offset at which they leave this node and their first token."""
    last_hidden: dict[int, Tensor] = field(default_factory=dict)
    """Last hidden states [D] of the prompts that end in this node, by the number of its tokens that they cover."""
    routed_experts: np.ndarray | None = None
    """The record [N, layers, k] of the tokens' experts, in scopes of requests that record them."""
    states: dict[int, RecurrentState] = field(default_factory=dict)
    """Saved states of the recurrent layers, by the number of the node's tokens after which they are."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached beginning of a prompt: nodes along a path and the number of tokens that match in each."""

    path: tuple[tuple[PrefixNode, int], ...] = ()
    last_hidden: Tensor | None = None
    """Last hidden state [D], if the match is a whole prompt that was prefilled before."""
    state: RecurrentState | None = None
    """State at the end of the match, in a model with recurrent layers."""

    @property
    def length(self) -> int:
        return sum(count for _, count in self.path)


KVReader = Callable[[int], tuple[Tensor, Tensor]]
"""Returns copies of a sequence's keys and values [layers, heads, N, width] from a position on."""


class PrefixCache:
    """The trees of all scopes; `tokens` is the number of tokens in their nodes, and of those that states are worth."""

    def __init__(self, state_tokens: int = 0) -> None:
        """`state_tokens`: how many tokens a saved state is worth; 0 for a model without recurrent layers."""
        self.tokens = 0
        self._state_tokens = state_tokens
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
        match = PrefixMatch(tuple((node, count) for node, count in path if count))
        return _to_saved_state(match) if self._state_tokens else match

    def match_prompt(self, scope: PrefixScope, tokens: np.ndarray) -> PrefixMatch | None:
        """The whole prompt with its last hidden state, or None if it was not prefilled before."""
        path = self._walk(scope, tokens)
        if sum(count for _, count in path) < len(tokens):
            return None
        node, count = path[-1]
        if count not in node.last_hidden or (self._state_tokens and count not in node.states):
            return None
        return PrefixMatch(tuple(path), node.last_hidden[count], node.states.get(count))

    def add_last_hidden(self, scope: PrefixScope, tokens: np.ndarray, last_hidden: Tensor) -> None:
        """Store a prompt's last hidden state [D], if the prompt itself is cached."""
        path = self._walk(scope, tokens)
        if sum(count for _, count in path) == len(tokens):
            node, count = path[-1]
            node.last_hidden.setdefault(count, last_hidden.clone())

    def add_state(self, scope: PrefixScope, tokens: np.ndarray, state: RecurrentState) -> None:
        """Store the state of the recurrent layers after `tokens`, if these are cached; `state` is not copied."""
        path = self._walk(scope, tokens)
        if path and sum(count for _, count in path) == len(tokens):
            node, count = path[-1]
            if count not in node.states:
                node.states[count] = state
                self.tokens += self._state_tokens

    def add(
        self, scope: PrefixScope, tokens: np.ndarray, read: KVReader, routed_experts: np.ndarray | None = None
    ) -> None:
        """Store the part of `tokens` (int32 [N]) that is not cached yet; `read` gives its keys and values, and
        `routed_experts` is the record [N, layers, k] of its experts."""
        path = self._walk(scope, tokens)
        matched = sum(count for _, count in path)
        if matched < len(tokens):
            parent, offset = path[-1] if path else (None, 0)
            node = PrefixNode(tokens[matched:].copy(), *read(matched), parent, offset)
            node.routed_experts = None if routed_experts is None else routed_experts[matched:].copy()
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
            self.tokens -= self._size(node)
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
            self.tokens -= self._size(node)

    def _size(self, node: PrefixNode) -> int:
        return len(node.tokens) + self._state_tokens * len(node.states)

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


def _to_saved_state(match: PrefixMatch) -> PrefixMatch:
    """The match up to the last saved state in it."""
    path = list(match.path)
    while path:
        node, count = path.pop()
        if saved := [end for end in node.states if end <= count]:
            return PrefixMatch((*path, (node, max(saved))), state=node.states[max(saved)])
    return PrefixMatch()


def _common_length(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix of two token rows."""
    length = min(len(left), len(right))
    differences = np.flatnonzero(left[:length] != right[:length])
    return int(differences[0]) if differences.size else length
