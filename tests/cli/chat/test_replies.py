"""Replies of an OpenAI API: streams, refusals, connections that end."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.chat.tool_calls.formats import opened_thinking
from tinsmith.cli.chat.replies import ReplySettings, ReplyStream
from tinsmith.cli.chat.thinking import ThinkingSplitter
from tinsmith.errors import ConfigError, EngineError, TinsmithError, UserError

ASK = [{"role": "user", "content": "39 + 13? \ud800"}]


def events(*bodies: Any, done: bool = True) -> str:
    return "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + "data: [DONE]\n\n" * done


def stream(answer: Any, **options: Any) -> tuple[ReplyStream, list[httpx.Request]]:
    sent: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, text=answer)

    client = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://server/")
    return ReplyStream(client, "tinker://run/weights/1", options.pop("settings", ReplySettings()), **options), sent


def chunk(text: str | None, ended: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {} if text is None else {"content": text}, "finish_reason": ended}]}


def test_pieces_come_as_the_server_sends_them() -> None:
    settings = ReplySettings(max_tokens=4, temperature=0.0, more={"top_k": 3}, template_values={"think": False})
    replies, sent = stream(events(chunk(""), chunk("5"), chunk("2"), chunk(None, "length")), settings=settings)
    pieces = list(replies.reply(ASK))
    assert [(piece.text, piece.ended) for piece in pieces] == [("5", ""), ("2", ""), ("", "length")]
    assert sent[0].url.path == "/oai/api/v1/chat/completions"
    assert json.loads(sent[0].content) == {
        "model": "tinker://run/weights/1",
        "stream": True,
        "messages": [{"role": "user", "content": "39 + 13? \ufffd"}],
        "max_tokens": 4,
        "temperature": 0.0,
        "top_k": 3,
        "chat_template_kwargs": {"think": False},
    }


def test_conversation_of_an_own_template_is_sent_as_tokens() -> None:
    replies, sent = stream(
        events({"choices": [{"text": "52", "finish_reason": "stop"}]}), encode=lambda messages: [len(messages), 7]
    )
    assert [piece.text for piece in replies.reply(ASK)] == ["52"]
    assert (sent[0].url.path, json.loads(sent[0].content)["prompt"]) == ("/oai/api/v1/completions", [1, 7])


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (httpx.Response(404, json={"error": {"message": "no such model"}}), UserError, "no such model"),
        (httpx.Response(502, text="<html>"), EngineError, "status 502"),
        (events(chunk("5"), {"error": {"message": "the engine died"}}), EngineError, "the engine died"),
        (events(chunk("5"), done=False), EngineError, "before it was complete"),
        (httpx.ConnectError("refused"), ConfigError, "No server responds at http://server"),
        (httpx.ReadError("reset"), EngineError, "http://server ended the reply: reset"),
    ],
)
def test_faults_are_errors_in_the_words_of_the_server(answer: Any, error: type[TinsmithError], text: str) -> None:
    replies, _ = stream(answer)
    with pytest.raises(error, match=text):
        list(replies.reply(ASK))


def test_error_for_a_model_names_those_that_are_served() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(
                200, json={"data": [{"id": "toy"}, {"id": "other"}, {"id": "x:train:0", "parent": "toy"}]}
            )
        return httpx.Response(404, json={"error": {"message": "There is no model /abs/merged"}})

    client = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://server/")
    with pytest.raises(
        ConfigError, match="server at http://server has no model /abs/merged; it serves toy, other"
    ) as no:
        ReplyStream(client, "/abs/merged", ReplySettings()).check("Serve it.")
    assert no.value.hint == "Serve it."


def test_piece_says_in_what_thinking_the_reply_begins() -> None:
    replies, _ = stream(events({**chunk(""), "opened_thinking": "</think>"}, chunk("hm</think>52", "stop")))
    assert [(each.opened_thinking, each.text) for each in replies.reply(ASK)] == [
        ("</think>", ""),
        ("", "hm</think>52"),
    ]


def test_missing_weights_are_noticed_at_once() -> None:
    replies, sent = stream(httpx.Response(404, json={"error": {"message": "There is no checkpoint"}}))
    with pytest.raises(UserError, match="There is no checkpoint"):
        replies.check()
    assert sent[0].url.raw_path == b"/oai/api/v1/models/tinker%3A%2F%2Frun%2Fweights%2F1"


@settings(max_examples=40)
@given(st.data())
def test_thinking_is_separated_wherever_pieces_end(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.tuples(st.booleans(), st.text("a<>/th", max_size=6))))
    whole = "".join(f"<think>{text}</think>" if thinking else text for thinking, text in parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    once, pieces = ThinkingSplitter(), ThinkingSplitter()
    at_once = [*once.feed(whole), *once.finish()]
    edges = [0, *cuts, len(whole)]
    divided = [each for start, end in pairwise(edges) for each in pieces.feed(whole[start:end])]
    divided += pieces.finish()
    assert _joined(divided) == _joined(at_once)
    assert _joined([(thinking, text) for thinking, text in parts if text]) == _joined(at_once)


def _joined(parts: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    """Neighbors of one kind together."""
    joined: list[tuple[bool, str]] = []
    for thinking, text in parts:
        if joined and joined[-1][0] == thinking:
            joined[-1] = thinking, joined[-1][1] + text
        else:
            joined.append((thinking, text))
    return joined


def test_thinking_may_begin_in_the_prompt() -> None:
    end = opened_thinking("<|assistant|><think>\n")
    splitter = ThinkingSplitter(end)
    assert [*splitter.feed("12 + "), *splitter.feed("40</thi"), *splitter.feed("nk>52")] == [
        (True, "12 + "),
        (True, "40"),
        (False, "52"),
    ]
    assert opened_thinking("<|assistant|>") == ""
