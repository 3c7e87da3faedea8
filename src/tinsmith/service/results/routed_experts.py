"""Records of routed experts of samples: whole ones of a result, and recent ones for clients to fetch and train with.

Recent records are kept in memory only, as results of samples are, up to a number of bytes; the oldest are dropped
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from tinsmith.engine.base import SampleResult
from tinsmith.errors import NotFound
from tinsmith.routed_experts import to_text

MAX_BYTES = 512 * 2**20
"""Records of all tenants: 1.4 million tokens of a model with 48 layers and 8 experts for each token."""


def recorded_experts(sampled: SampleResult) -> list[np.ndarray]:
    """The record [N + L - 1, layers, k] of each sequence with its prompt; empty if the request recorded none."""
    prompt = sampled.prompt_routed_experts
    return [] if prompt is None else [_joined(prompt, sequence) for sequence in _of_sequences(sampled)]


class RecentRoutedExperts:
    """The records of recent samples: prompt, and each sequence without its last token."""

    def __init__(self, owner_of: Callable[[str], str | None]) -> None:
        """`owner_of` returns the tenant of a sampling session, by its id."""
        self._owner_of = owner_of
        self._records: OrderedDict[str, tuple[np.ndarray, Sequence[np.ndarray]]] = OrderedDict()
        self._bytes = 0

    def add(self, request_id: str, sampled: SampleResult) -> None:
        """Keep the records of a request's sequences, if it has any."""
        prompt, sequences = sampled.prompt_routed_experts, _of_sequences(sampled)
        if prompt is None:
            return
        self._records[request_id] = prompt, sequences
        self._bytes += _size(prompt, sequences)
        while self._bytes > MAX_BYTES and len(self._records) > 1:
            _, dropped = self._records.popitem(last=False)
            self._bytes -= _size(*dropped)

    def text(self, sequence_id: str, owner: str) -> str | None:
        """The record [N + L - 1, layers, k] of a sequence with its prompt (`routed_experts.to_text`).

        None if there is none any more, or never was. Raises NotFound for an id that is not the owner's.
        """
        request_id, _, number = sequence_id.rpartition(":")
        if not number.isdecimal() or self._owner_of(request_id.rpartition(":")[0]) != owner:
            raise NotFound(f"There is no sequence {sequence_id}.", "Give ids that asample returned.")
        prompt, sequences = self._records.get(request_id, (None, []))
        if prompt is None or int(number) >= len(sequences):
            return None
        return to_text(_joined(prompt, sequences[int(number)]))


def _of_sequences(sampled: SampleResult) -> list[np.ndarray]:
    return [each.routed_experts for each in sampled.sequences if each.routed_experts is not None]


def _joined(prompt: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    return np.concatenate([prompt, sequence])


def _size(prompt: np.ndarray, sequences: Sequence[np.ndarray]) -> int:
    return prompt.nbytes + sum(sequence.nbytes for sequence in sequences)
