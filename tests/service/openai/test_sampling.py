"""What a choice shows while it grows is never taken back, and ends before its stop string."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.test_tokenizer import card
from tinsmith.chat.tokenizer import Words, load
from tinsmith.chat.tool_calls import Reading
from tinsmith.service.openai.sampling import Choice


@pytest.fixture(scope="module")
def words(tiny_llama: Path) -> Words:
    return load("tiny", card(str(tiny_llama)))


def test_stop_strings_are_held_back_and_cut(words: Words):
    def told(text: str, stops: tuple[str, ...], stay: bool = False) -> tuple[list[str], str]:
        choice = Choice(growing=words.growing(words.special), stops=stops, stops_stay=stay)
        pieces = [choice.feed([token]).text for token in words.encode(text, marked=False)]
        return [*pieces, choice.end().text], choice.finish("length")

    pieces, finish = told("one STOP two", ("STOP",))
    assert ("".join(pieces), finish) == ("one ", "stop")
    assert not any("S" in piece for piece in pieces)
    assert "".join(told("one STOP two", ("STOP",), stay=True)[0]) == "one STOP"
    assert "".join(told("one STO", ("STOP", "X"))[0]) == "one STO"


def test_a_call_ends_a_choice_as_a_call_unless_it_was_too_long(words: Words):
    for reason, finish in (("stop", "tool_calls"), ("length", "length")):
        choice = Choice(growing=words.growing(words.special), reading=Reading("tagged"))
        grown = choice.feed(words.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>', marked=False))
        assert [call.name for call in grown.calls] == ["add"]
        assert choice.end().text == ""
        assert choice.finish(reason) == finish  # type: ignore[arg-type]
