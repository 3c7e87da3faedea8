"""Chat messages are rendered with the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.chat.tokenizer import Tokenizer, load_tokenizer
from tinsmith.engine.base import ModelCard
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.openai.requests import render_prompt
from tinsmith.service.openai.schemas import ChatBody

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.name }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.a }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = load_tokenizer("toy", "characters:512")
    made.tokenizer.chat_template = TEMPLATE
    return made


CARD = ModelCard(
    source="toy", tokenizer="toy", arch="fake", vocab_size=512, context_length=4096, eos_token_ids=(2,),
    dtype="float32", device="cpu",
)  # fmt: skip


def render(tokenizer: Tokenizer, *messages: dict[str, Any], **more: Any) -> str:
    ids, *_ = render_prompt(ChatBody(model="toy", messages=list(messages), **more), tokenizer, CARD)
    return tokenizer.decode(ids)


def test_renders_roles_content_parts_and_missing_content(tokenizer: Tokenizer):
    assert render(tokenizer, {"role": "user", "content": "hi"}) == "[user||hi|]>"
    assert render(tokenizer, {"role": "developer", "content": "be brief"}) == "[system||be brief|]>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(tokenizer, {"role": "user", "content": parts}, add_generation_prompt=False) == "[user||a\nb|]"
    assert render(tokenizer, {"role": "assistant", "content": None, "refusal": None}) == "[assistant|||]>"


def test_tool_calls_get_object_arguments_and_results_get_names(tokenizer: Tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 39}'}}
    history = ({"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "52"})
    assert render(tokenizer, *history) == "[assistant|||add:39][tool|add|52|]>"


@pytest.mark.parametrize(("opening", "end"), [("><think>\n", "</think>"), (">[THINK]", "[/THINK]"), (">", "")])
def test_thinking_that_the_template_opens_is_named(tokenizer: Tokenizer, opening: str, end: str):
    tokenizer.tokenizer.chat_template = f"{{{{ messages[0].content }}}}{opening}"
    body = ChatBody(model="toy", messages=[{"role": "user", "content": "hi"}])
    assert render_prompt(body, tokenizer, CARD)[-1] == end


def test_continue_final_message_continues_the_reply(tokenizer: Tokenizer):
    begun = {"role": "assistant", "content": "It is"}
    assert render(tokenizer, begun, continue_final_message=True) == "[assistant||It is"
    with pytest.raises(BadRequest, match="exclude each other"):
        render(tokenizer, begun, continue_final_message=True, add_generation_prompt=True)


def test_rejects_invalid_messages_and_tools(tokenizer: Tokenizer):
    with pytest.raises(BadRequest, match=r"messages\[0\].role"):
        render(tokenizer, {"content": "hi"})
    with pytest.raises(Unsupported, match="part of type image_url"):
        render(tokenizer, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    with pytest.raises(BadRequest, match="not a function call"):
        render(tokenizer, {"role": "assistant", "tool_calls": [{"id": 1}]})
    with pytest.raises(BadRequest, match=r"tools\[0\]"):
        render(tokenizer, {"role": "user", "content": "hi"}, tools=({"type": "function"},))
