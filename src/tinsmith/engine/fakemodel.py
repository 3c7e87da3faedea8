"""The fake engine's language: a bigram model, and how its tokens are spelt.

The hidden state of a position is a fixed random vector of its token, logits are a fixed random matrix times that
vector, and a LoRA adapter adds to the matrix. Token id 2 ends a sequence.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tinsmith.engine.base import ModelCard
from tinsmith.engine.fakefiles import Weights

HIDDEN = 16
ROWS = 256
"""Positions whose logits are in memory at once."""


class Bigram:
    """A source's model. One that is a folder with a config.json lends its vocabulary size, and its tokenizer."""

    def __init__(self, source: str) -> None:
        folder, vocab = Path(source), 512
        if (folder / "config.json").is_file():
            vocab = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        self.card = ModelCard(
            source=source,
            tokenizer=str(folder.resolve()) if folder.is_dir() else source,
            arch="fake",
            vocab_size=vocab,
            context_length=32768,
            eos_token_ids=(2,),
            dtype="float32",
            device="cpu",
        )
        rng = np.random.default_rng(zlib.crc32(source.encode()))
        self._embed = rng.standard_normal((vocab, HIDDEN), dtype=np.float32)
        self._out = rng.standard_normal((vocab, HIDDEN), dtype=np.float32) * np.float32(0.5)
        words = folder / "tokenizer.json"
        self.spell = _speller(Tokenizer.from_file(str(words)) if words.is_file() else None)

    def logprobs(self, tokens: np.ndarray, weights: Weights | None) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """(positions, hidden [n, D], log-softmax [n, V]) in pieces of ROWS."""
        for start in range(0, len(tokens), ROWS):
            rows = slice(start, min(start + ROWS, len(tokens)))
            hidden = self._embed[tokens[rows]]
            logits = hidden @ self._out.T
            if weights is not None:
                logits += np.float32(weights.scale) * ((hidden @ weights.a.T) @ weights.b.T)
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            yield rows, hidden, logits


def entropies_of(logp: np.ndarray) -> np.ndarray:
    """Of the rows of a log-softmax."""
    return -(np.exp(logp) * logp).sum(axis=1)


def _speller(tokenizer: Tokenizer | None) -> Callable[[list[int]], str]:
    if tokenizer is None:
        return lambda tokens: "".join(map(chr, tokens))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
