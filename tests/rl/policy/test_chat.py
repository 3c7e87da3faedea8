"""Chat: templates, prompts that extend sampled turns, and loss masks."""

from __future__ import annotations

import pytest
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer

from tests.models import CHATML
from tests.tokenizers import KINDS, save
from tinsmith.errors import ConfigError, UserError
from tinsmith.rl.policy.chat import Chat, read_template
from tinsmith.rl.types import Message, Turn

ASK = Message(role="user", content="What is 39 + 13?")
MORE = Message(role="user", content="Are you sure?")


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    """Tokenizer of the tiny Llama."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def spell(tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of a text, without special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def turn(chat: Chat, tokenizer, reply: str, *conversation, stop="stop") -> Turn:
    """A reply encoded character by character, as no tokenizer would encode it."""
    tokens = tuple(item for letter in reply for item in spell(tokenizer, letter))
    tokens += spell(tokenizer, "<|im_end|>") if stop == "stop" else ()
    return Turn(
        prompt=tuple(chat.prompt(conversation)), tokens=tokens, logprobs=(0.0,) * len(tokens), text=reply, stop=stop
    )


def test_prompt_equals_the_rendered_template(tokenizer):
    chat = Chat(tokenizer)
    assert (
        tokenizer.decode(chat.prompt([ASK]))
        == "<|im_start|>user\n" + ASK.content + "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.prompt([ASK]) == tokenizer.apply_chat_template(
        [{"role": "user", "content": ASK.content}], add_generation_prompt=True, return_dict=False
    )


def test_template_with_bos_token_writes_it_once(tokenizer):
    own = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    ids = Chat(tokenizer, own).prompt([ASK])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == tokenizer.bos_token + ASK.content


def test_template_receives_values_and_tools(tokenizer):
    own = "{{ enable_thinking }} {{ messages[0].content }} {% if tools %}{{ tools[0].function.name }}{% endif %}"
    chat = Chat(tokenizer, own, {"enable_thinking": False})
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert tokenizer.decode(chat.prompt([ASK], tools)) == f"False {ASK.content} add"


def test_with_template_values_returns_a_copy(tokenizer):
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}{{ mood }}"
    chat = Chat(tokenizer, template, {"enable_thinking": True, "mood": "!"})
    conversation = [Message(role="user", content="Hi")]
    assert tokenizer.decode(chat.with_template_values({"enable_thinking": False}).prompt(conversation)) == "Hi!"
    assert tokenizer.decode(chat.prompt(conversation)) == "Hi<think>!"


def test_final_assistant_message_begins_the_reply(tokenizer):
    ids = Chat(tokenizer).prompt([ASK, Message(role="assistant", content="<think>")])
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>")


def test_next_prompt_extends_the_turn_token_by_token(tokenizer):
    chat = Chat(tokenizer)
    first = turn(chat, tokenizer, "it is 52", ASK)
    ids = chat.prompt([ASK, first, MORE])
    said = [*first.prompt, *first.tokens]
    assert ids[: len(said)] == said
    assert tokenizer.decode(ids[len(said) :]) == "\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt([ASK, first]) == said


def test_truncated_reply_is_ended_before_the_next_message(tokenizer):
    chat = Chat(tokenizer)
    first = turn(chat, tokenizer, "it is", ASK, stop="length")
    ids = chat.prompt([ASK, first, MORE])
    assert tokenizer.decode(ids).count("<|im_end|>") == 3
    second = turn(chat, tokenizer, "yes", ASK, first, MORE)
    assert chat.prompt([ASK, first, MORE, second, MORE])[: len(second.prompt)] == ids


def test_template_that_omits_replies_is_rendered_whole(tokenizer):
    chat = Chat(tokenizer, "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    first = turn(chat, tokenizer, "52", ASK)
    assert tokenizer.decode(chat.prompt([ASK, first, MORE])) == f"{ASK.content}\n{MORE.content}\n"


def test_without_a_template_messages_are_joined(tokenizer):
    bare = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    chat = Chat(bare)
    first = turn(chat, tokenizer, "52", ASK)
    assert tokenizer.decode(chat.prompt([ASK, MORE])) == f"{ASK.content}\n\n{MORE.content}"
    assert tokenizer.decode(chat.prompt([ASK, first, MORE])) == f"{ASK.content}52<|im_end|>\n\n{MORE.content}"


def test_loss_mask_covers_the_last_or_every_reply(tokenizer):
    chat = Chat(tokenizer)
    answers = [Message(role="assistant", content="52"), Message(role="assistant", content="yes, 52")]
    talk = [ASK, answers[0], MORE, answers[1]]
    tokens, mask = chat.encode_with_loss_mask(talk)
    assert tokens == spell_all(tokenizer, talk)
    assert tokenizer.decode([token for token, m in zip(tokens, mask, strict=True) if m]) == "yes, 52<|im_end|>"
    ((tokens, mask),) = chat.encode_every_reply(talk)
    assert tokens == spell_all(tokenizer, talk)
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "52<|im_end|>yes, 52<|im_end|>"
    with pytest.raises(UserError, match="end with the assistant"):
        chat.encode_with_loss_mask(talk[:3])


def spell_all(tokenizer, messages) -> list[int]:
    """Token ids of rendered messages."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(chat, return_dict=False)


def test_reply_text_excludes_stop_and_special_tokens(tokenizer):
    chat = Chat(tokenizer)
    tokens = tokenizer.encode("one\nUser: two<|im_end|>")
    assert chat.text(tokens, ("\nUser:",)) == "one"
    assert chat.text(tokens, None) == "one\nUser: two"
    assert chat.text(tokens, None, keep=("<|im_end|>",)) == "one\nUser: two<|im_end|>"


def test_template_errors_are_user_errors(tokenizer):
    with pytest.raises(UserError, match="no system here"):
        Chat(tokenizer, "{{ raise_exception('no system here') }}").prompt([ASK])


def test_reads_a_template_from_text_or_file(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "own.jinja")) == read_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match="there is no file"):
        read_template(str(tmp_path / "other.jinja"))


CONVERSATION = [ASK, Message(role="assistant", content="51"), MORE, Message(role="assistant", content="It is 52")]
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def learned(tokenizer, tokens: list[int], mask: list[bool]) -> list[str]:
    """Texts of the masked spans."""
    runs: list[list[int]] = []
    for at, (token, item) in enumerate(zip(tokens, mask, strict=True)):
        if item and (at == 0 or not mask[at - 1]):
            runs.append([])
        if item:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_loss_mask_includes_the_end_of_sequence_token(tokenizer, template):
    chat = Chat(tokenizer, template)
    tokens, mask = chat.encode_with_loss_mask(CONVERSATION)
    assert learned(tokenizer, tokens, mask) == ["It is 52<|im_end|>"]
    ((tokens, mask),) = chat.encode_every_reply(CONVERSATION)
    assert learned(tokenizer, tokens, mask) == ["51<|im_end|>", "It is 52<|im_end|>"]


@pytest.mark.parametrize("is_marked", [False, True])
def test_every_reply_is_learned_as_it_was_when_it_was_last(tokenizer, is_marked):
    said = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>"
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + ("{% generation %}" + said + "{% endgeneration %}" if is_marked else said)
        + "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    if is_marked:  # only the assistant's messages are marked
        template = MARKED.replace(
            "{{ message.content }}<|im_end|>{% endgen", said.replace("m.", "message.") + "{% endgen"
        )
    replies = [Message(role="assistant", content=f"<think>{n}</think>{n}") for n in range(3)]
    talk = [ASK, replies[0], MORE, replies[1], MORE, replies[2]]
    rows = Chat(tokenizer, template).encode_every_reply(talk)
    assert [learned(tokenizer, *row) for row in rows] == [[f"<think>{n}</think>{n}<|im_end|>"] for n in range(3)]
    assert "<think>0" not in tokenizer.decode(rows[2][0])
    (row,) = Chat(tokenizer, template).encode_every_reply(
        [ASK, Message(role="assistant", content="a"), MORE, replies[2]]
    )
    assert learned(tokenizer, *row) == ["a<|im_end|>", "<think>2</think>2<|im_end|>"]


def test_tokens_before_the_loss_mask_are_the_prompt(tokenizer):
    chat = Chat(tokenizer)
    tokens, mask = chat.encode_with_loss_mask(CONVERSATION[:2])
    assert tokens[: mask.index(True)] == chat.prompt(CONVERSATION[:1])


def test_loss_mask_requires_a_final_assistant_message(tokenizer):
    with pytest.raises(UserError, match="must end with the assistant"):
        Chat(tokenizer).encode_with_loss_mask([ASK])


def test_stop_string_may_hold_a_special_token(tokenizer):
    chat = Chat(tokenizer)
    tokens = spell(tokenizer, "a</answer><|im_end|>\nb")
    assert chat.text(tokens, ("</answer><|im_end|>",)) == "a"
    assert chat.text(tokens, ("<|im_end|>\nb",)) == "a</answer>"
    assert chat.text(tokens, ("b", "</")) == "a"  # the first in the text, whatever their order
    assert chat.text(tokens, ("</answer>\nb",)) == "a</answer>\nb"  # nor does the server stop there


@pytest.mark.parametrize("kind", KINDS)
def test_reply_text_is_what_the_tokenizer_decodes(kind, tmp_path):
    tokenizer = save(kind, tmp_path, CHATML)
    chat, ids = Chat(tokenizer), list(tokenizer.get_vocab().values())
    replies = [
        ids[:40],
        ids[5:9] * 2,
        [*ids[-3:], *ids[:3]],
        [id for id in ids if "0xF0" in str(tokenizer.convert_ids_to_tokens(id))],
    ]
    for reply in replies:
        visible = [token for token in reply if token not in tokenizer.all_special_ids]
        expected = tokenizer.backend_tokenizer.decode(visible, skip_special_tokens=False) if visible else ""
        assert chat.text(reply, None) == chat.text(reply, ("is not there",)) == expected
        expected.encode()


def test_reply_text_of_a_tokenizer_in_python():
    tokenizer = ByT5Tokenizer()
    chat, tokens = Chat(tokenizer), spell(tokenizer, "hé €.\nNo")
    assert chat.text(tokens, None) == "hé €.\nNo"
    assert chat.text(tokens, (".\n",)) == "hé €"
    assert chat.decode(tokens[:3]) == "hé"


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"holds \\ud83d, which is half a surrogate pair"):
        Chat(tokenizer).encode_text("a\ud83d")
