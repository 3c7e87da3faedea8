"""Provenance spans: a datum's claims about the sampled sequences that its tokens come from.

A span covers the next `length` positions of the model input, or of the targets, and claims that they are positions
offset, offset + 1, … of a sequence's prompt, or of its sampled tokens. Spans tile their field. No loss reads them, but
wrong spans are rejected: spans that do not tile, sequences of other tenants, and, while a sample's lengths are known,
spans that exceed it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tinsmith.errors import BadRequest
from tinsmith.service.wire.protobuf import pb

MAX_REQUESTS = 20_000
"""Sampling requests whose lengths are stored, those of the last batches; the oldest are dropped first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One span; `where` names it in errors."""

    where: str
    sequence_id: str
    offset: int
    length: int
    sampled: bool
    """Positions of the sampled tokens, not of the prompt."""

    @property
    def request_id(self) -> str:
        """Id of the sampling request that produced the sequence."""
        return self.sequence_id.rpartition(":")[0]


def parse_claims(message: pb.ForwardBackwardRequest, lengths: Iterable[tuple[int, int]]) -> list[Claim]:
    """The claims of all data; `lengths` are (positions, targets) of each datum. Raises BadRequest."""
    claims: list[Claim] = []
    for index, (datum, (positions, targets)) in enumerate(zip(message.data, lengths, strict=True)):
        where = f"data[{index}]"
        if bool(datum.model_input_spans) != bool(datum.loss_fn_input_spans):
            raise BadRequest(f"{where} has spans for one of model_input and loss_fn_inputs.", "Give both or neither.")
        if datum.model_input_spans:
            claims += _parse_spans(f"{where}.model_input_spans", datum.model_input_spans, positions)
            claims += _parse_spans(f"{where}.loss_fn_input_spans", datum.loss_fn_input_spans, targets)
    return claims


class SequenceRegistry:
    """Lengths of recent samples, to check claims against: request -> (prompt, each sequence).

    A busy service fills it within minutes, so an entry is small: a hash of 64 bits in place of the id, and the lengths
    as bytes, neither of which garbage collection looks at. Two ids among 20,000 share a hash once in 10^11 services.
    """

    def __init__(self, owner_of: Callable[[str], str | None]) -> None:
        self._owner_of = owner_of
        """Tenant of a sampling session, by its id."""
        self._lengths: dict[int, bytes] = {}
        """Hash of the request's id -> the length of the prompt and of each sampled sequence, 4 bytes each."""
        self._order: deque[int] = deque()
        """The hashes, the oldest first. The first key of a dict is slow to find once many before it are deleted."""

    def record(self, request_id: str, prompt: int, sampled: Sequence[int]) -> None:
        """Record the lengths of a request's prompt and sampled sequences."""
        key = hash(request_id)
        if key not in self._lengths:
            self._order.append(key)
        self._lengths[key] = array("I", (prompt, *sampled)).tobytes()
        if len(self._order) > MAX_REQUESTS:
            del self._lengths[self._order.popleft()]

    def check(self, claims: Iterable[Claim], owner: str) -> None:
        """Raise BadRequest for a claim about a sequence that is not the owner's, or that exceeds its sequence."""
        for claim in claims:
            request_id, _, number = claim.sequence_id.rpartition(":")
            if not number.isdecimal() or self._owner_of(request_id.rpartition(":")[0]) != owner:
                raise _unknown(claim)
            lengths = self._lengths.get(hash(claim.request_id))
            if lengths is None:
                continue  # sampled before a restart, or too long ago
            prompt, *sampled = array("I", lengths)
            if int(number) >= len(sampled):
                raise _unknown(claim)
            length, kind = (sampled[int(number)], "sampled") if claim.sampled else (prompt, "prompt")
            if claim.offset + claim.length > length:
                raise BadRequest(
                    f"{claim.where} covers {claim.offset} to {claim.offset + claim.length} of the {kind} tokens of "
                    f"{claim.sequence_id}, which are {length}.",
                    "Correct the span.",
                )


def _parse_spans(where: str, spans: Sequence[pb.ProvenanceSpan], positions: int) -> Iterator[Claim]:
    covered = 0
    for index, span in enumerate(spans):
        kind = span.WhichOneof("span")
        if kind is None:
            raise BadRequest(f"{where}[{index}] is empty.", "Give prompt_tokens or sampled_tokens.")
        source = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
        if source.offset < 0 or source.length < 0 or not source.sequence_id:
            raise BadRequest(
                f"{where}[{index}] has sequence_id '{source.sequence_id}', offset {source.offset}, "
                f"length {source.length}.",
                "Name a sequence; the numbers must not be negative.",
            )
        covered += source.length
        yield Claim(
            where=f"{where}[{index}]",
            sequence_id=source.sequence_id,
            offset=source.offset,
            length=source.length,
            sampled=kind == "sampled_tokens",
        )
    if covered != positions:
        raise BadRequest(f"{where} cover {covered} positions of {positions}.", "Spans must tile their field exactly.")


def _unknown(claim: Claim) -> BadRequest:
    return BadRequest(f"{claim.where} names sequence {claim.sequence_id}, which does not exist.", "Sample it first.")
