"""Chat templates get the content of messages in the form that they take, and none of it is lost silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinsmith.chat.messages import parse_messages
from tinsmith.chat.rendering import takes_parts
from tinsmith.chat.tokenizer import Tokenizer, load_tokenizer
from tinsmith.errors import BadRequest
from tinsmith.rl.policy.chat import Chat
from tinsmith.rl.types import Message

LOOP = "{% for part in CONTENT %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
PARTS = {
    "loop": LOOP.replace("CONTENT", "m['content']"),
    "set": "{% set c = m['content'] %}" + LOOP.replace("CONTENT", "c"),
    "attribute": LOOP.replace("CONTENT", "m.content"),
    "filter": "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text | trim }}{% endfor %}",
    "namespace": "{% set ns = namespace(c=m['content']) %}" + LOOP.replace("CONTENT", "ns.c"),
    "index": "{{ m['content'][0]['text'] }}",
    "map": "{{ m.content | map(attribute='text') | join('') }}",
}
TEXT = {
    "plain": "{{ m['content'] }}",
    "trim": "{{ m.content | trim }}",
    "upper": "{{ m.content | upper }}",
    "json": "{{ m.content | tojson }}",
    "both": "{% if m.content is string %}{{ m.content }}{% else %}"
    + LOOP.replace("CONTENT", "m.content")
    + "{% endif %}",
}
USER = {"role": "user", "content": "Grüße  an <alle>"}


def template(content: str) -> str:
    """ChatML with this expression for the content."""
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n" + content + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> Any:
    return load_tokenizer("tiny", str(tiny_llama)).tokenizer


@pytest.fixture
def tokenizer(base: Any) -> Any:
    def of(text: str) -> Tokenizer:
        base.chat_template = text
        return Tokenizer("tiny", base)

    original = base.chat_template
    yield of
    base.chat_template = original


def render(tokenizer: Tokenizer, *messages: dict[str, Any], continues: bool = False) -> str:
    parsed = parse_messages(messages, developer_role=False)
    return tokenizer.render_text(
        parsed, None, add_generation_prompt=not continues, continue_final_message=continues, values={}
    )


def test_form_of_a_template_by_role():
    assert {name: takes_parts(template(content), "user") for name, content in PARTS.items()} == dict.fromkeys(
        PARTS, True
    )
    assert {name: takes_parts(template(content), "user") for name, content in TEXT.items()} == dict.fromkeys(
        TEXT, False
    )
    macro = "{% macro say(c) %}" + LOOP.replace("CONTENT", "c") + "{% endmacro %}" + template("{{ say(m.content) }}")
    assert takes_parts(macro, "user")
    mixed = template("{% if m.role == 'user' %}" + PARTS["loop"] + "{% else %}{{ m.content }}{% endif %}")
    assert [role for role in ("system", "user", "assistant", "tool") if takes_parts(mixed, role)] == ["user"]
    assert not takes_parts("{{ raise_exception('no') }}", "user")
    assert not takes_parts("{{ bos_token + messages[0].content }}", "user", (("bos_token", "<s>"),))


@pytest.mark.parametrize("name", sorted(PARTS))
def test_template_that_takes_parts_gets_the_text(tokenizer: Any, name: str):
    text = render(tokenizer(template(PARTS[name])), {"role": "system", "content": "Be brief."}, USER)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße  an <alle><|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_joined_for_templates_that_take_text(tokenizer: Any):
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert "user\none\ntwo<" in render(tokenizer(template(TEXT["plain"])), parts)
    assert "user\nonetwo<" in render(tokenizer(template(PARTS["loop"])), parts)


@pytest.mark.parametrize("name", sorted(TEXT))
def test_changed_text_is_not_missing_text(tokenizer: Any, name: str):
    for content in ("Grüße", "user", "", "  ", "A long question, longer than by chance."):
        assert render(tokenizer(template(TEXT[name])), {"role": "user", "content": content})


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Always the same.", "the user's messages"),
        ("user assistant", "the user's messages"),
        (template("{% if m.role == 'system' %}{{ m.content }}{% endif %}"), "the user's messages"),
        (template("{% if loop.index <= 2 %}{{ m.content }}{% endif %}"), "the last message"),
        (template("{{ m.content | length > 0 }}"), "the user's messages"),
    ],
)
def test_prompt_without_the_users_text_is_refused(tokenizer: Any, text: str, missing: str):
    chat = [
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "x"},
    ]
    with pytest.raises(BadRequest, match=f"template of tiny leaves out the text of {missing}"):
        render(tokenizer(text), {"role": "system", "content": "s"}, *chat)


def test_template_may_keep_the_last_messages_only(tokenizer: Any):
    text = "{{ messages[-1].content }}"
    assert render(tokenizer(text), USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "x"}) == "x"


def test_harness_renders_parts_too(base: Any):
    chat = Chat(base, template(PARTS["loop"]))
    ask, reply = Message(role="user", content="ask"), Message(role="assistant", content="reply")
    assert "user\nask<|im_end|>" in chat.decode(chat.prompt([ask]))
    tokens, mask = chat.encode_with_loss_mask([ask, reply])
    assert chat.decode([token for token, flag in zip(tokens, mask, strict=True) if flag]).startswith("reply")
    with pytest.raises(BadRequest, match="leaves out"):
        Chat(base, "Always the same.").prompt([ask])


@pytest.mark.parametrize("content", [TEXT["plain"], TEXT["trim"], PARTS["loop"], PARTS["filter"]])
def test_continued_empty_message_keeps_the_templates_text(tokenizer: Any, content: str):
    model = tokenizer(template(content))
    for empty in ("", None, []):
        text = render(model, USER, {"role": "assistant", "content": empty}, continues=True)
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert render(model, USER, {"role": "assistant", "content": "It is"}, continues=True).endswith("assistant\nIt is")
    omitted = tokenizer(template("{% if m.role == 'user' %}{{ m.content }}{% endif %}"))
    with pytest.raises(BadRequest, match="leaves out the final message"):
        render(omitted, USER, {"role": "assistant", "content": ""}, continues=True)
