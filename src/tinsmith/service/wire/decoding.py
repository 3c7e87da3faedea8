"""Decoding of the bodies that cost most, of forward_backward and asample: in this process, or in an HTTP front end.

A front end decodes a body and forwards it with the packed result, in the scope of the request. `unpack` raises the
error that decoding raised there, so a route answers the same wherever its body was decoded.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from tinsmith.engine.base import Pass
from tinsmith.errors import TinsmithError
from tinsmith.service.wire.protobuf import decompress, parse_pass, pass_from_message
from tinsmith.service.wire.provenance import Claim, parse_claims

DECODED = "tinsmith.decoded"
"""Key of a scope: the packed result of a body that a front end has decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPass:
    """The content of a forward_backward body, without the body."""

    seq: int
    operation: Pass
    claims: list[Claim]


def decode_pass_body(body: bytes, content_encoding: str | None) -> tuple[bytes, DecodedPass]:
    """(decompressed body, its content). Raises BadRequest, Unsupported or TooLarge."""
    plain = decompress(body, content_encoding)
    message = parse_pass(plain)
    seq, operation = pass_from_message(message)
    lengths = [(len(datum.tokens), len(datum.targets)) for datum in operation.data]
    return plain, DecodedPass(seq=seq, operation=operation, claims=parse_claims(message, lengths))


def pack(value: Any) -> bytes:
    """A decoded body, or a TinsmithError, as bytes. Only this program on this machine reads them."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    """A decoded body. Raises the TinsmithError that was packed in its place."""
    value = pickle.loads(packed)
    if isinstance(value, TinsmithError):
        raise value
    return value
