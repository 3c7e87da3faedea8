"""Text and tokens agree with transformers; a growing text never shows half a character."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinsmith.chat.tokenizer import Words, load
from tinsmith.engine.base import ModelCard
from tinsmith.errors import BadRequest, Unsupported

TEXT = "Grüße, 日本語 and 😀😀: done"
MESSAGES = [{"role": "user", "content": "Add 39 and 13, 😀."}, {"role": "assistant", "content": "It is"}]


def card(folder: str) -> ModelCard:
    return ModelCard(
        source=folder,
        tokenizer=folder,
        arch="fake",
        vocab_size=512,
        context_length=64,
        eos_token_ids=(2,),
        dtype="float32",
        device="cpu",
    )


@pytest.fixture(scope="module")
def words(tiny_llama: Path) -> Words:
    return load("tiny", card(str(tiny_llama)))


@pytest.fixture(scope="module")
def theirs(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def test_prompts_are_those_of_transformers(words: Words, theirs: Any):
    for begin, go_on in ((True, False), (False, False), (False, True)):
        ids = words.render(MESSAGES, None, begin=begin, go_on=go_on, values={})
        wanted = theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=begin, continue_final_message=go_on, return_dict=False
        )
        assert ids == wanted
    assert words.encode(TEXT, marked=True) == theirs(TEXT).input_ids


def test_a_growing_text_is_whole_characters(words: Words):
    growing, told = words.growing(words.special), []
    ids = words.encode(TEXT, marked=False)
    for token in [1, *ids, 2]:
        told.append(growing.feed([token]))
    assert "".join(told) == TEXT
    assert growing.end() == ""
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in told)
    assert sum(bool(piece) for piece in told) > 5  # it grew


def test_half_a_character_shows_at_the_end_alone(words: Words):
    ids = words.encode("ab😀", marked=False)
    growing = words.growing(words.special)
    assert growing.feed(ids[:-1]) == "ab"
    assert growing.end() == "\N{REPLACEMENT CHARACTER}"


def test_tokens_add_up_to_the_bytes_of_the_text(words: Words):
    spelled = [words.spelled(token)[1] for token in words.encode(TEXT, marked=False)]
    assert b"".join(raw or b"?" for raw in spelled) == TEXT.encode()


def test_a_model_without_tokenizer_spells_letters():
    letters = load("toy", card("toy"))
    assert letters.encode("hé", marked=True) == [ord("h"), ord("é")]
    assert letters.decode([104, 233]) == "hé"
    assert letters.special == {2}


def test_what_the_template_does_not_take_is_refused(words: Words, tmp_path: Path):
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.thinking is not read"):
        words.render(MESSAGES, None, begin=True, go_on=False, values={"thinking": True})
    with pytest.raises(BadRequest, match="does not take these messages"):
        words.render([{"role": "user"}], None, begin=True, go_on=False, values={})
    with pytest.raises(BadRequest, match="surrogate"):
        words.encode("\ud83d", marked=False)
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        load("bare", card(str(tmp_path)))


def test_it_all_goes_without_torch(tiny_llama: Path):
    program = (
        "import sys; from tests.chat.test_tokenizer import card; from tinsmith.chat.tokenizer import load;"
        f"words = load('tiny', card({str(tiny_llama)!r}));"
        "words.render([{'role': 'user', 'content': 'hi'}], None, begin=True, go_on=False, values={});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
