"""Messages of the API become what chat templates want."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.test_tokenizer import card
from tinsmith.chat.tokenizer import Words, load
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.openai.requests import prompt_of
from tinsmith.service.openai.schemas import ChatBody

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.name }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.a }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def words() -> Words:
    made = load("toy", card("toy"))
    made.tokenizer.chat_template = TEMPLATE
    return made


def said(words: Words, *messages: dict[str, Any], **more: Any) -> str:
    ids, _ = prompt_of(ChatBody(model="toy", messages=list(messages), **more), words)
    return words.decode(ids)


def test_roles_parts_and_absent_texts(words: Words):
    assert said(words, {"role": "user", "content": "hi"}) == "[user||hi|]>"
    assert said(words, {"role": "developer", "content": "be brief"}) == "[system||be brief|]>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said(words, {"role": "user", "content": parts}, add_generation_prompt=False) == "[user||a\nb|]"
    assert said(words, {"role": "assistant", "content": None, "refusal": None}) == "[assistant|||]>"


def test_calls_have_objects_and_answers_have_names(words: Words):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 39}'}}
    history = ({"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "52"})
    assert said(words, *history) == "[assistant|||add:39][tool|add|52|]>"


def test_an_answer_goes_on(words: Words):
    begun = {"role": "assistant", "content": "It is"}
    assert said(words, begun, continue_final_message=True) == "[assistant||It is"
    with pytest.raises(BadRequest, match="exclude each other"):
        said(words, begun, continue_final_message=True, add_generation_prompt=True)


def test_what_is_no_message_is_refused(words: Words):
    with pytest.raises(BadRequest, match=r"messages\[0\].role"):
        said(words, {"content": "hi"})
    with pytest.raises(Unsupported, match="part of type image_url"):
        said(words, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    with pytest.raises(BadRequest, match="no function call"):
        said(words, {"role": "assistant", "tool_calls": [{"id": 1}]})
    with pytest.raises(BadRequest, match=r"tools\[0\]"):
        said(words, {"role": "user", "content": "hi"}, tools=({"type": "function"},))
