"""Rollouts as they are shown: pieces, colored tokens, and text of models that is hostile or long."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.rl.history import rollout_html
from tinsmith.rl.history.transcript import level, pieces_of, transcript

HOSTILE = "<script>alert(1)</script>\"'><img onerror=x>[red]markup[/] \x1b[31mANSI\x1b]0;title\x07\u202e\0{{ 7*7 }}"


def record(text: str, **more: Any) -> dict[str, Any]:
    turn = {
        "input": text, "text": text, "stop": "length", "model": text, "version": 1, "tokens": [1, 2],
        "token_texts": [text, "b"], "logprobs": [-0.1, -9.0], "trainer_logprobs": [-0.1, None], "advantages": 0.5,
    }  # fmt: skip
    trajectory = {"role": text, "reward": 1.0, "trained": False, "turns": [turn]}
    texts = {"task": text, "error": text, "answer": text, "termination": text, "reward_parts": {text: 1.0}}
    return {**texts, "messages": [{"role": text, "content": text}], "trajectories": [trajectory], **more}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("a <think>b</think> c", ["text:a", "thinking:b", "text:c"]),
        ("b</think>c", ["thinking:b", "text:c"]),
        ("<think>never ends", ["thinking:never ends"]),
        ("<tool_call>{}</tool_call>\n<tool_call>x", ["tool_call:{}", "tool_call:x"]),
        ("a</tool_call> b", ["text:a</tool_call> b"]),
        ("", []),
    ],
)
def test_replies_are_divided_into_pieces(text: str, kinds: list[str]) -> None:
    assert [f"{piece.kind}:{piece.text}" for piece in pieces_of(text)] == kinds


def test_reply_may_begin_within_thinking() -> None:
    assert [piece.kind for piece in pieces_of("so", is_thinking=True)] == ["thinking"]


def test_tokens_have_values_and_shades() -> None:
    first, second = transcript(record("a")).trajectories[0].turns[0].tokens
    assert (first.value("difference"), second.value("difference"), second.value("advantage")) == (0.0, None, 0.5)
    assert [level(value, 1.0) for value in (None, -9.0, 0.04, 0.5, 9.0)] == [0, -5, 0, 2, 5]


@pytest.mark.parametrize("measure", [None, "logprob", "advantage", "difference"])
def test_html_escapes_all_text(measure: Any) -> None:
    page = rollout_html(record(HOSTILE), measure)
    assert "<script" not in page
    assert "<img" not in page
    assert "onerror=x>" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page


def test_html_of_a_long_reply_is_short() -> None:
    long = record("x" * 100_000)
    long["trajectories"][0]["turns"][0]["text"] = "x" * 10_000_000
    assert len(rollout_html(long)) < 200_000
    long["trajectories"][0]["turns"][0] |= {"tokens": [1] * 100_000, "token_texts": ["y"] * 100_000}
    assert "96,000 more tokens" in rollout_html({**long, "error": "e"}, "logprob")


@pytest.mark.parametrize("value", [None, [], {}, 1, "text", True, [[]], [{}], {"a": {}}])
def test_records_of_any_form_are_shown(value: Any) -> None:
    assert rollout_html(dict.fromkeys(record("a"), value), "logprob")
    turns = {"trajectories": [{"role": value, "turns": [dict.fromkeys(("tokens", "logprobs", "text"), value)]}]}
    assert rollout_html({**record("a"), **turns}, "difference")
