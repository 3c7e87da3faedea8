"""Provenance spans of a datum: claims about which sampled sequences its tokens come from, read and checked.

A span covers the next `length` positions of the model input, or of the targets, and says: these are positions offset,
offset + 1, … of that sequence's prompt, or of its sampled tokens. Spans tile their field. No loss that is served here
reads them, but a client that sends them is told when they are wrong: where they do not tile, where a sequence is not
this tenant's, and, while the sample is remembered, where they reach beyond it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tinsmith.errors import BadRequest
from tinsmith.service.wire.protobuf import pb

REMEMBERED = 50_000
"""Sampling requests whose lengths are known; beyond them the oldest are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One span; `where` names it to the client."""

    where: str
    sequence_id: str
    offset: int
    length: int
    sampled: bool
    """Of the sampled tokens; else of the prompt."""

    @property
    def request_id(self) -> str:
        """The sampling request that the sequence is of."""
        return self.sequence_id.rpartition(":")[0]


def parse_claims(message: pb.ForwardBackwardRequest, lengths: Iterable[tuple[int, int]]) -> list[Claim]:
    """The spans of all data, whose positions and targets are as many as `lengths` says. Raises BadRequest."""
    found: list[Claim] = []
    for index, (datum, (positions, targets)) in enumerate(zip(message.data, lengths, strict=True)):
        where = f"data[{index}]"
        if bool(datum.model_input_spans) != bool(datum.loss_fn_input_spans):
            raise BadRequest(f"{where} has spans for one of model_input and loss_fn_inputs.", "Give both or neither.")
        if datum.model_input_spans:
            found += _tiles(f"{where}.model_input_spans", datum.model_input_spans, positions)
            found += _tiles(f"{where}.loss_fn_input_spans", datum.loss_fn_input_spans, targets)
    return found


class SequenceRegistry:
    """Lengths of what was sampled: request -> (its prompt's, each sequence's)."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, tuple[int, Sequence[int]]] = OrderedDict()

    def keep(self, request_id: str, prompt: int, sampled: Sequence[int]) -> None:
        """Remember a request."""
        self._lengths[request_id] = (prompt, sampled)
        if len(self._lengths) > REMEMBERED:
            self._lengths.popitem(last=False)

    def check(self, claims: Iterable[Claim], is_owned: Callable[[str], bool]) -> None:
        """Raises BadRequest for a claim that cannot be. `is_owned` knows the tenant's sampling sessions."""
        for claim in claims:
            request_id, _, number = claim.sequence_id.rpartition(":")
            if not number.isdecimal() or not is_owned(request_id.rpartition(":")[0]):
                raise _unknown(claim)
            if claim.request_id not in self._lengths:
                continue  # before a restart, or long ago
            prompt, sampled = self._lengths[claim.request_id]
            if int(number) >= len(sampled):
                raise _unknown(claim)
            length, kind = (sampled[int(number)], "sampled") if claim.sampled else (prompt, "prompt")
            if claim.offset + claim.length > length:
                raise BadRequest(
                    f"{claim.where} covers {claim.offset} to {claim.offset + claim.length} of the {kind} tokens of "
                    f"{claim.sequence_id}, which are {length}.",
                    "Count again.",
                )


def _tiles(where: str, spans: Sequence[pb.ProvenanceSpan], positions: int) -> Iterator[Claim]:
    covered = 0
    for index, span in enumerate(spans):
        kind = span.WhichOneof("span")
        if kind is None:
            raise BadRequest(f"{where}[{index}] is empty.", "Give prompt_tokens or sampled_tokens.")
        one = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
        if one.offset < 0 or one.length < 0 or not one.sequence_id:
            raise BadRequest(
                f"{where}[{index}] has sequence_id '{one.sequence_id}', offset {one.offset}, length {one.length}.",
                "Name a sequence; neither number may be negative.",
            )
        covered += one.length
        yield Claim(
            where=f"{where}[{index}]",
            sequence_id=one.sequence_id,
            offset=one.offset,
            length=one.length,
            sampled=kind == "sampled_tokens",
        )
    if covered != positions:
        raise BadRequest(f"{where} cover {covered} positions of {positions}.", "Spans tile their field exactly.")


def _unknown(claim: Claim) -> BadRequest:
    return BadRequest(f"{claim.where} names sequence {claim.sequence_id}, which is not known here.", "Sample it first.")
