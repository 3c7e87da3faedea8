"""ChoiceDecoder: returned text is final, ends before a stop string, and each token has its place in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizers import KINDS
from tinsmith.chat.choice_decoder import ChoiceDecoder, StopStrings
from tinsmith.chat.detokenizer import Detokenizer, TokenTexts
from tinsmith.chat.tokenizer import Tokenizer, load_tokenizer
from tinsmith.chat.tool_calls.formats import ToolCallFormat
from tinsmith.chat.tool_calls.parser import ToolCallParser


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return load_tokenizer("tiny", str(tiny_llama))


def decoder(
    texts: TokenTexts, hidden: frozenset[int], stops: tuple[str, ...], *, include: bool = False
) -> ChoiceDecoder:
    return ChoiceDecoder(
        detokenizer=Detokenizer(texts, hidden),
        stops=StopStrings(stops, Detokenizer(texts)) if stops else None,
        include_stop=include,
    )


def test_choice_decoder_holds_back_and_cuts_stop_strings(tokenizer: Tokenizer):
    def decode(text: str, stops: tuple[str, ...], include: bool = False) -> tuple[list[str], str]:
        choice = decoder(tokenizer.texts, tokenizer.special_ids, stops, include=include)
        pieces = [choice.feed([token]).text for token in tokenizer.encode(text, add_special_tokens=False)]
        return [*pieces, choice.end().text], choice.finish_reason("length")

    pieces, finish = decode("one STOP two", ("STOP",))
    assert ("".join(pieces), finish) == ("one ", "stop")
    assert not any("S" in piece for piece in pieces)
    assert "".join(decode("one STOP two", ("STOP",), include=True)[0]) == "one STOP"
    assert "".join(decode("one STO", ("STOP", "X"))[0]) == "one STO"


@pytest.mark.parametrize(
    ("stop", "text", "with_stop", "offsets"),
    [
        ("<|stop|>b", "ab", "ab<|stop|>b", [0, 1, 2, 10, 11]),
        ("b<|stop|>", "a", "ab<|stop|>", [0, 1, 2, 10, 10]),
        ("<|stop|>", "ab", "ab<|stop|>", [0, 1, 2, 10, 10]),
        ("op|>b", "ab", "abop|>b", [0, 1, 2, 6, 7]),
    ],
)
def test_stop_string_may_hold_a_special_token(stop: str, text: str, with_stop: str, offsets: list[int]):
    backend = KINDS["byte_level"]()
    vocabulary = backend.get_vocab()
    ids = [vocabulary[token] for token in ("a", "b", "<|stop|>", "b", "a")]
    hidden = frozenset(ids[2:3])
    for include, expected, places in (
        (False, text, [min(at, len(text)) for at in offsets]),
        (True, with_stop, offsets),
    ):
        choice = decoder(TokenTexts(backend), hidden, (stop,), include=include)
        assert choice.feed(ids).text + choice.end().text == expected
        assert choice.offsets == places
        assert choice.finish_reason("length") == "stop"


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma", "t5"])
@settings(max_examples=150, deadline=None)
@given(draws=st.data())
def test_stream_equals_whole_and_cuts_at_the_first_stop(kind: str, draws: st.DataObject):
    backend = KINDS[kind]()
    texts = TokenTexts(backend)
    some = st.sampled_from([texts.of(token)[0] for token in range(backend.get_vocab_size()) if texts.of(token)[0]])
    stops = draws.draw(st.lists(st.tuples(some, st.sampled_from(["", "a", " the"])).map("".join), max_size=2))
    ids = draws.draw(st.lists(st.integers(0, backend.get_vocab_size()), max_size=12))
    special = frozenset(number for number, token in backend.get_added_tokens_decoder().items() if token.special)
    hidden = draws.draw(st.sampled_from([frozenset[int](), special]))
    include = draws.draw(st.booleans())
    whole, stream = (decoder(texts, hidden, tuple(stops), include=include) for _ in range(2))
    text = whole.feed(ids).text + whole.end().text
    assert "".join([stream.feed([token]).text for token in ids]) + stream.end().text == text
    assert stream.offsets == whole.offsets
    assert len(whole.offsets) == len(ids)
    assert whole.offsets == sorted(whole.offsets)
    assert all(0 <= offset <= len(text) for offset in whole.offsets)
    full = backend.decode(ids, skip_special_tokens=False) if ids else ""
    assert whole.stopped == any(stop in full for stop in stops)
    if not hidden and whole.stopped:
        ends = [full.index(stop) + (len(stop) if include else 0) for stop in stops if stop in full]
        assert len(text) in ends
        assert full.startswith(text)
    if not whole.stopped:
        shown = [token for token in ids if token not in hidden]
        assert text == (backend.decode(shown, skip_special_tokens=False) if shown else "")


def test_finish_reason_is_tool_calls_unless_truncated(tokenizer: Tokenizer):
    for reason, finish in (("stop", "tool_calls"), ("length", "length")):
        choice = ChoiceDecoder(
            detokenizer=tokenizer.detokenizer(tokenizer.special_ids), parser=ToolCallParser(ToolCallFormat("tagged"))
        )
        grown = choice.feed(
            tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>', add_special_tokens=False)
        )
        assert [call.name for call in grown.calls] == ["add"]
        assert choice.end().text == ""
        assert choice.finish_reason(reason) == finish  # type: ignore[arg-type]
