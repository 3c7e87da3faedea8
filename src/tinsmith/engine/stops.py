"""Whether a token completes a stop string: a sequence's last tokens read as text, as they stand behind its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def completes(tokenizer: Any, strings: Sequence[str], prompt: np.ndarray, said: Sequence[int], token: int) -> bool:
    """Whether with `token`, after `prompt` (int32 [N], N >= 1) and what was said, the text holds one of the strings.

    Every token spells a byte at least, so as many of the last as the longest string has bytes will do, and a few more.
    """
    if not strings:
        return False
    tail = max(len(string.encode()) for string in strings) + 4
    last = [*said[-tail:], token]
    text = tokenizer.decode(last) if len(said) > tail else _behind(tokenizer, int(prompt[-1]), last)
    return any(string in text for string in strings)


def _behind(tokenizer: Any, before: int, tokens: Sequence[int]) -> str:
    """The text of tokens after another: decoders of the SentencePiece kind take the first space of a text away."""
    text, front = tokenizer.decode([before, *tokens]), tokenizer.decode([before])
    if text.startswith(front):
        return text[len(front) :]
    return tokenizer.decode(tokens)  # half a character, which the first of the tokens went on with
