"""Decoding of forward_backward bodies."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.engine.base import Pass
from tinsmith.service.wire.protobuf import decompress, parse_pass, pass_from_message
from tinsmith.service.wire.provenance import Claim, parse_claims


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPass:
    """The content of a forward_backward body."""

    plain: bytes | None
    """The body, decompressed; None if it was not compressed."""
    seq: int
    operation: Pass
    claims: list[Claim]


def decode_pass_body(body: bytes, content_encoding: str | None) -> DecodedPass:
    """The body's content. Raises BadRequest, Unsupported or TooLarge."""
    plain = decompress(body, content_encoding)
    message = parse_pass(plain)
    seq, operation = pass_from_message(message)
    lengths = [(len(datum.tokens), len(datum.targets)) for datum in operation.data]
    return DecodedPass(
        plain=plain if content_encoding else None, seq=seq, operation=operation, claims=parse_claims(message, lengths)
    )
