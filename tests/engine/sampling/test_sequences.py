"""Stop strings are found where the text has them, whatever a decoder does to a text's first space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tinsmith.engine.sampling.sequences import completes_stop_string

WORDS = ["<unk>", "<s>", "</s>", "▁", "▁yes", "▁no", "▁stop", "s", "t", "o", "p", "<0xC3>", "<0xA9>", "▁é"]


@pytest.fixture(scope="module")
def spaced() -> Any:
    """A tokenizer as Llama 2's: a space is part of the word after it, and the first one of a text is taken away."""
    made = Tokenizer(BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def ends(tokenizer: Any, stop: str, before: int, said: list[int]) -> int | None:
    """Which of the tokens completes it."""
    prompt = np.array([1, before], np.int32)
    return next(
        (n for n in range(len(said)) if completes_stop_string(tokenizer, (stop,), prompt, said[:n], said[n])), None
    )


@pytest.mark.parametrize("before", range(11))
def test_a_leading_space_is_seen_on_the_first_token(spaced: Any, before: int) -> None:
    assert ends(spaced, " stop", before, [6, 4]) == 0
    assert ends(spaced, " stop", before, [4, 6, 4]) == 1
    assert ends(spaced, " stop", before, [3, 7, 8, 9, 10]) == 4
    assert ends(spaced, " stop", before, [7, 8, 9, 10, 4]) is None
    assert ends(spaced, "stop", before, [7, 8, 9, 10, 4]) == 3


def test_what_the_prompt_ends_with_is_no_part_of_it(spaced: Any) -> None:
    assert ends(spaced, " stop yes", 6, [4, 4]) is None
    assert ends(spaced, "stop", 6, [4, 4]) is None


def test_a_character_that_the_prompt_began_hides_nothing_that_follows(spaced: Any) -> None:
    assert ends(spaced, " stop", 11, [12, 6]) == 1
    assert ends(spaced, " no", 11, [12, *[4] * 40, 5]) == 41


def test_a_long_answer_is_read_from_its_end(spaced: Any) -> None:
    assert ends(spaced, " no yes", 4, [*[4] * 60, 5, 4]) == 61


def test_bytes_are_put_together(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for text in (" née", "\n\nUser:", "é\n"):
        said = tokenizer("so " + text + " then", add_special_tokens=False).input_ids
        parts = [tokenizer.decode(said[: n + 1]) for n in range(len(said))]
        assert ends(tokenizer, text, 2, said) == next(n for n, part in enumerate(parts) if text in part)
