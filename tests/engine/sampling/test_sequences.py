"""Stop strings, with decoders that drop the first space of a text and tokens that hold part of a character."""

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
def sentencepiece() -> Any:
    """A tokenizer like Llama 2's: a space belongs to the following word, and the first space of a text is dropped."""
    tokenizer = Tokenizer(BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def stop_position(tokenizer: Any, stop: str, last_prompt_token: int, sampled: list[int]) -> int | None:
    """Index of the token that completes the stop string."""
    prompt = np.array([1, last_prompt_token], np.int32)
    return next(
        (n for n in range(len(sampled)) if completes_stop_string(tokenizer, (stop,), prompt, sampled[:n], sampled[n])),
        None,
    )


@pytest.mark.parametrize("last_prompt_token", range(11))
def test_stop_string_with_leading_space_matches_first_token(sentencepiece: Any, last_prompt_token: int) -> None:
    assert stop_position(sentencepiece, " stop", last_prompt_token, [6, 4]) == 0
    assert stop_position(sentencepiece, " stop", last_prompt_token, [4, 6, 4]) == 1
    assert stop_position(sentencepiece, " stop", last_prompt_token, [3, 7, 8, 9, 10]) == 4
    assert stop_position(sentencepiece, " stop", last_prompt_token, [7, 8, 9, 10, 4]) is None
    assert stop_position(sentencepiece, "stop", last_prompt_token, [7, 8, 9, 10, 4]) == 3


def test_stop_string_does_not_match_prompt_text(sentencepiece: Any) -> None:
    assert stop_position(sentencepiece, " stop yes", 6, [4, 4]) is None
    assert stop_position(sentencepiece, "stop", 6, [4, 4]) is None


def test_stop_string_matches_after_partial_character(sentencepiece: Any) -> None:
    assert stop_position(sentencepiece, " stop", 11, [12, 6]) == 1
    assert stop_position(sentencepiece, " no", 11, [12, *[4] * 40, 5]) == 41


def test_stop_string_matches_at_end_of_long_sequence(sentencepiece: Any) -> None:
    assert stop_position(sentencepiece, " no yes", 4, [*[4] * 60, 5, 4]) == 61


def test_stop_string_matches_across_byte_tokens(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for text in (" née", "\n\nUser:", "é\n"):
        sampled = tokenizer("so " + text + " then", add_special_tokens=False).input_ids
        prefixes = [tokenizer.decode(sampled[: n + 1]) for n in range(len(sampled))]
        assert stop_position(tokenizer, text, 2, sampled) == next(n for n, part in enumerate(prefixes) if text in part)
