"""Records of routed experts: the experts that each token of a sequence went to, in each layer of a mixture.

A record is an array [tokens, layers, k] of uint8, or of uint16 for more than 255 experts. Its dtype's largest value
marks tokens without a record, in all layers: their experts are not known.

Records travel as text (base64 of a NumPy file) from the sampler to the client, or as vLLM's and verifiers' JSON, and
as int64 words in `loss_fn_inputs`, whose tensors know no smaller integers. Imports no torch: the API process and the
harness read records too.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The routers of a mixture: a record of N tokens has shape [N, layers, chosen].

    Example: RouterShape(layers=48, chosen=8, experts=128)
    """

    layers: int
    """Layers with experts."""
    chosen: int
    """Experts of a token in a layer."""
    experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """dtype of a record."""
        return np.dtype(np.uint8 if self.experts <= np.iinfo(np.uint8).max else np.uint16)

    @property
    def words(self) -> int:
        """int64 words of one token."""
        return -(-self.layers * self.chosen * self.dtype.itemsize // WORD_BYTES)

    def empty(self, tokens: int) -> np.ndarray:
        """A record of tokens whose experts are not known."""
        return np.full((tokens, self.layers, self.chosen), missing(self.dtype), self.dtype)


def missing(dtype: np.dtype[np.unsignedinteger]) -> int:
    """The value that marks tokens without a record."""
    return int(np.iinfo(dtype).max)


def to_text(record: np.ndarray) -> str:
    """base64 of the record as a NumPy file (format 1.0)."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(record), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def to_payload(record: np.ndarray) -> dict[str, Any]:
    """The record in JSON as verifiers and prime-rl read it: base64 of its bytes in C order, little-endian."""
    plain = np.ascontiguousarray(record, record.dtype.newbyteorder("<"))
    data = base64.b64encode(plain.tobytes()).decode("ascii")
    return {"data": data, "dtype": record.dtype.name, "shape": list(record.shape)}


def from_text(text: str) -> np.ndarray:
    """The record of a text. Raises ValueError."""
    try:
        record = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, EOFError, OSError) as error:
        raise ValueError(f"The text is no NumPy file in base64: {error}") from error
    if not isinstance(record, np.ndarray) or record.ndim != 3 or record.dtype not in (np.uint8, np.uint16):
        raise ValueError("The text is no record of routed experts: uint8 or uint16 [tokens, layers, k].")
    return record


def to_words(record: np.ndarray) -> np.ndarray:
    """A record as int64 [tokens, W]: the bytes of a token's ids, little-endian and padded with 0xFF to whole words."""
    rows = record.astype(record.dtype.newbyteorder("<"), copy=False).reshape(len(record), -1)
    narrow = np.ascontiguousarray(rows).view(np.uint8).reshape(len(record), -1)
    width = -(-narrow.shape[1] // WORD_BYTES) * WORD_BYTES
    padded = np.full((len(record), width), 0xFF, np.uint8)
    padded[:, : narrow.shape[1]] = narrow
    return padded.view("<i8").astype(np.int64, copy=False)


def from_words(words: np.ndarray, shape: RouterShape) -> np.ndarray:
    """The record of int64 words [tokens, W]. Raises ValueError unless it fits the shape."""
    if words.ndim != 2 or words.shape[1] != shape.words:
        raise ValueError(f"has shape {list(words.shape)}; this model has {shape.words} words for each token")
    flat = np.ascontiguousarray(words.astype("<i8", copy=False)).view(np.uint8).reshape(len(words), -1)
    used = shape.layers * shape.chosen * shape.dtype.itemsize
    record = np.ascontiguousarray(flat[:, :used]).view(shape.dtype.newbyteorder("<")).astype(shape.dtype, copy=False)
    record = record.reshape(len(words), shape.layers, shape.chosen)
    recorded = is_known(record)
    if int(record[recorded].max(initial=0)) >= shape.experts:
        raise ValueError(f"names expert {int(record[recorded].max())} of {shape.experts}")
    if _repeats(record[recorded]):
        raise ValueError("names an expert twice for one token and layer")
    return record


def is_known(record: np.ndarray) -> np.ndarray:
    """bool [tokens]: whether a token has a record."""
    rows = record.reshape(len(record), -1)
    return ~(rows == missing(record.dtype)).all(axis=1)


def marks(record: np.ndarray) -> np.ndarray:
    """uint64 [tokens]: a number for each token's experts; equal for equal experts, and else different."""
    factors = np.random.default_rng(0).integers(1, 2**63, record[:1].size, np.uint64) | np.uint64(1)
    return (record.reshape(len(record), -1).astype(np.uint64) + np.uint64(1)) @ factors


def share_that_differs(left: np.ndarray, right: np.ndarray) -> float:
    """Share of (token, layer) whose sets of experts differ, over the tokens that both know; 0 without any."""
    recorded = is_known(left) & is_known(right)
    if not recorded.any():
        return 0.0
    return float((np.sort(left[recorded], axis=2) != np.sort(right[recorded], axis=2)).any(axis=2).mean())


def _repeats(record: np.ndarray) -> bool:
    ordered = np.sort(record, axis=2)
    return bool((ordered[:, :, 1:] == ordered[:, :, :-1]).any())
