"""ChoiceDecoder: returned text is final and ends before a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.chat.tokenizer import Tokenizer, load_tokenizer
from tinsmith.chat.tool_calls import ToolCallParser
from tinsmith.service.openai.sampling import ChoiceDecoder


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return load_tokenizer("tiny", str(tiny_llama))


def test_choice_decoder_holds_back_and_cuts_stop_strings(tokenizer: Tokenizer):
    def decode(text: str, stops: tuple[str, ...], stay: bool = False) -> tuple[list[str], str]:
        choice = ChoiceDecoder(detokenizer=tokenizer.detokenizer(tokenizer.special_ids), stops=stops, include_stop=stay)
        pieces = [choice.feed([token]).text for token in tokenizer.encode(text, add_special_tokens=False)]
        return [*pieces, choice.end().text], choice.finish_reason("length")

    pieces, finish = decode("one STOP two", ("STOP",))
    assert ("".join(pieces), finish) == ("one ", "stop")
    assert not any("S" in piece for piece in pieces)
    assert "".join(decode("one STOP two", ("STOP",), stay=True)[0]) == "one STOP"
    assert "".join(decode("one STO", ("STOP", "X"))[0]) == "one STO"


def test_finish_reason_is_tool_calls_unless_truncated(tokenizer: Tokenizer):
    for reason, finish in (("stop", "tool_calls"), ("length", "length")):
        choice = ChoiceDecoder(
            detokenizer=tokenizer.detokenizer(tokenizer.special_ids), parser=ToolCallParser("tagged")
        )
        grown = choice.feed(
            tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>', add_special_tokens=False)
        )
        assert [call.name for call in grown.calls] == ["add"]
        assert choice.end().text == ""
        assert choice.finish_reason(reason) == finish  # type: ignore[arg-type]
