"""The text of tokens, whole and as it grows, is what `tokenizer.decode` makes of them, for every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from tests.tokenizers import KINDS
from tinsmith.chat.detokenizer import REPLACEMENT, Detokenizer, TokenTexts
from tinsmith.chat.tokenizer import load_tokenizer

BACKENDS = {**KINDS, "characters": lambda: _characters}
_characters = load_tokenizer("toy", "characters:300").tokenizer.backend_tokenizer


def special_ids(backend: Backend) -> frozenset[int]:
    return frozenset(number for number, token in backend.get_added_tokens_decoder().items() if token.special)


def grow(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(token) for token in ids), detokenizer.end()]


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(draws=st.data())
def test_growing_text_equals_decode(kind: str, draws: st.DataObject):
    backend = BACKENDS[kind]()
    size = backend.get_vocab_size()
    ids = draws.draw(st.lists(st.one_of(st.integers(0, size + 2), st.integers(0, min(size, 261))), max_size=16))
    hidden = draws.draw(st.sampled_from([frozenset[int](), special_ids(backend), frozenset(ids[::3])]))
    detokenizer = Detokenizer(TokenTexts(backend), hidden)
    pieces = grow(detokenizer, ids)
    shown = [token for token in ids if token not in hidden]
    assert "".join(pieces) == backend.decode(shown, skip_special_tokens=False)
    assert detokenizer.length == len("".join(pieces))
    assert len(detokenizer.starts) == len(ids)
    assert list(detokenizer.starts) == sorted(detokenizer.starts)


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(draws=st.data())
def test_text_of_a_token_is_at_its_start(kind: str, draws: st.DataObject):
    backend = BACKENDS[kind]()
    if kind == "end_of_word":
        return  # the text of a token depends on the next one
    texts = TokenTexts(backend)
    ids = draws.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=16))
    detokenizer = Detokenizer(texts, has_begun=True)
    text = "".join(grow(detokenizer, ids))
    broken = any(REPLACEMENT in texts.of(token)[0] for token in ids)
    for token, start in zip(ids, detokenizer.starts, strict=True):
        own, raw = texts.of(token)
        if own.encode() == raw and not (broken and texts.byte(token) is not None):
            assert text.startswith(own, start)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_tokens_of_one_character_begin_at_it(kind: str):
    backend = KINDS[kind]()
    ids = backend.encode("ab 😀ab", add_special_tokens=False).ids
    detokenizer = Detokenizer(TokenTexts(backend))
    assert "".join(grow(detokenizer, ids)) == "ab 😀ab"
    assert list(detokenizer.starts)[-5:] == [3, 3, 3, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_add_up_to_the_text(kind: str):
    if kind == "end_of_word":
        return
    backend = KINDS[kind]()
    texts, ids = TokenTexts(backend), backend.encode("the ab token é 😀", add_special_tokens=False).ids
    spelled = b"".join(texts.of(token)[1] for token in ids)
    assert spelled.decode().strip() == backend.decode(ids, skip_special_tokens=False)


def test_incomplete_character_shows_at_the_end():
    backend = KINDS["byte_level"]()
    ids = backend.encode("ab😀").ids
    assert grow(Detokenizer(TokenTexts(backend)), ids[:-1]) == ["ab", *[""] * (len(ids) - 2), REPLACEMENT]


def test_text_is_returned_token_by_token():
    for kind in ("byte_level", "llama2", "gemma", "t5", "words"):
        backend = KINDS[kind]()
        ids = backend.encode("the token of the machine", add_special_tokens=False).ids
        pieces = grow(Detokenizer(TokenTexts(backend)), ids)
        assert pieces[-1] == ""
        assert all(pieces[:-1]), kind


def test_unusual_decoders_return_text_at_the_end():
    for decoder in (
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b"), decoders.Fuse()]),
    ):
        backend = Backend.from_str(KINDS["gemma"]().to_str())
        backend.decoder = decoder
        ids = backend.encode("abab the ", add_special_tokens=False).ids
        detokenizer = Detokenizer(TokenTexts(backend))
        pieces = grow(detokenizer, [*ids, ids[0]])
        assert "".join(pieces) == pieces[-1] == backend.decode([*ids, ids[0]], skip_special_tokens=False)
        assert len(detokenizer.starts) == len(ids) + 1
