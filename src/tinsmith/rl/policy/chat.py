"""Chats as tokens and tokens as text, by a model's tokenizer and chat template: for prompts and for data to learn from.

What was sampled is never spelled anew: a Turn within a conversation stands for its own tokens, so that the next prompt
extends the last one token by token. A chat template is the whole of a prompt: no token is put before or after it, so
one that writes the beginning of a text itself has it once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError, UserError
from tinsmith.rl.types import Message, Turn

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a template says itself which words are the assistant's."""

_MARK = "\ue000reply\ue001"
"""Stands in a rendered chat where a reply's own tokens go; letters that no text has."""

Conversation = Sequence[Message | Turn]


class PromptTooLong(UserError):
    """A prompt beyond sampling.max_prompt_tokens: it is not asked."""


class Chat:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, template: str = "", values: Mapping[str, Any] | None = None) -> None:
        """`tokenizer` is a transformers tokenizer; `template` replaces its own; `values` go to the template by name."""
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template
        self._values = dict(values or {})

    @property
    def vocabulary(self) -> int:
        """How many token ids the tokenizer knows."""
        return len(self._tokenizer)

    @property
    def template(self) -> str:
        """The chat template; empty if there is none. Of several, the one that is told of tools."""
        if isinstance(self._template, Mapping):
            return str(self._template.get("tool_use") or self._template.get("default") or "")
        return str(self._template or "")

    def with_template_values(self, values: Mapping[str, Any]) -> Chat:
        """The same tokenizer and template, but that these values go to the template as well."""
        return Chat(self._tokenizer, self._template, {**self._values, **values})

    def prompt(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The conversation so far and the start of a reply; a last message of the assistant is the reply's beginning.

        A model without a template gets the bare texts. Raises UserError for what the template does not take.
        """
        last = max((at for at, part in enumerate(conversation) if isinstance(part, Turn)), default=-1)
        if last < 0:
            return self._spelled(conversation, tools)
        turn, after = conversation[last], conversation[last + 1 :]
        assert isinstance(turn, Turn)
        said = [*turn.prompt, *turn.tokens]
        if not after:
            return said
        marked = [*conversation[:last], Message(role="assistant", content=_MARK), *after]
        _, found, tail = self._rendered(marked, tools).rpartition(_MARK)
        if not found:  # the template leaves this reply out of the chat, as some do with old ones
            return self._spelled(conversation, tools)
        ids = self.encode_text(tail)
        return said + ids[turn.tokens[-1:] == tuple(ids[:1]) :]

    def encode_with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, every: bool = False
    ) -> tuple[list[int], list[bool]]:
        """A whole chat as tokens, and which of them are the assistant's: of its last message, or of every one.

        The template's own {% generation %} decides; without one, all that it writes after the start of a reply, up to
        the token that ends a text. Raises UserError where the assistant does not have the last word.
        """
        if not messages or messages[-1].role != "assistant":
            raise UserError(
                "A chat to learn from must end with the assistant.", "Add its message, or leave out the row."
            )
        if _GENERATION.search(self.template):
            return self._marked(messages, tools, every)
        spoken = [at for at, message in enumerate(messages) if message.role == "assistant"]
        tokens: list[int] = []
        mask: list[bool] = []
        for at in spoken if every else spoken[-1:]:
            before = self._rendered(messages[:at], tools) if at else ""
            whole = self._rendered(messages[: at + 1], tools, begin=False)
            if not whole.startswith(before):  # the template begins a reply otherwise than it ends up in the chat
                before = self._rendered(messages[:at], tools, begin=False) if at else ""
            prompt, all_of_it = (
                self.encode_text(before),
                self.encode_text(before) + self.encode_text(whole[len(before) :]),
            )
            if prompt[: len(tokens)] != tokens:  # an old reply reads otherwise now: it is no part of what is learned
                mask = []
            reply = all_of_it[len(prompt) :]
            end = self._end_of(reply)
            mask = [*mask, *[False] * (len(prompt) - len(mask)), *[True] * end, *[False] * (len(reply) - end)]
            tokens = all_of_it
        return tokens, mask

    def _end_of(self, reply: Sequence[int]) -> int:
        """How much of a rendered reply a policy says: nothing after the token that ends it."""
        ends = [at for at, token in enumerate(reply) if token == self._tokenizer.eos_token_id]
        return ends[-1] + 1 if ends else len(reply)

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], every: bool
    ) -> tuple[list[int], list[bool]]:
        """By the template's own marks."""
        given = self._tokenizer.apply_chat_template(
            [_plain(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._values,
        )
        mask = [bool(one) for one in given["assistant_masks"]]
        if not every:
            last = max((at for at, one in enumerate(mask) if one), default=-1)
            first = next((at for at in range(last, -1, -1) if not mask[at]), -1)
            mask = [at > first and one for at, one in enumerate(mask)]
        return list(given["input_ids"]), mask

    def encode_text(self, text: str) -> list[int]:
        """Text as tokens, with nothing put around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None, keep: Sequence[str] = ()) -> str:
        """A reply without special tokens, but for those in `keep`, and without the string that ended it."""
        hidden = self._special - {self._tokenizer.convert_tokens_to_ids(word) for word in keep}
        shown = [token for token in tokens if token not in hidden]
        text = self._tokenizer.decode(shown, skip_special_tokens=False)
        for one in stop or ():
            if isinstance(one, str) and one in text:
                return text[: text.index(one)]
        return text

    @cached_property
    def _special(self) -> set[int]:
        return {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def _spelled(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if not self.template:
            return list(self._tokenizer.encode(self._rendered(conversation, tools)))
        return self.encode_text(self._rendered(conversation, tools))

    def _rendered(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]], *, begin: bool = True) -> str:
        """As text; `begin` ends it where a reply begins."""
        messages = [_plain(part) for part in conversation]
        if not self.template:
            return _joined(messages)
        goes_on = begin and messages[-1]["role"] == "assistant"
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.template,
                add_generation_prompt=begin and not goes_on,
                continue_final_message=goes_on,
                tokenize=False,
                **self._values,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise UserError(
                f"The chat template does not take these messages: {error}", "Change messages or template."
            ) from error


def read_template(text: str) -> str:
    """A chat template as a run file gives it: jinja, or the path of a file that holds it. Raises ConfigError."""
    if not text or "{" in text:
        return text
    file = Path(text).expanduser()
    if not file.is_file():
        raise ConfigError(f"model.chat_template: there is no file {file}.", "Give a path, or the template itself.")
    return file.read_text(encoding="utf-8")


def _plain(part: Message | Turn) -> dict[str, Any]:
    if isinstance(part, Turn):
        return {"role": "assistant", "content": part.text}
    return {"role": part.role, "content": part.content, **part.more}


def _joined(messages: Sequence[Mapping[str, Any]]) -> str:
    """Bare texts; what follows a reply, and what a reply follows, is set off by an empty line."""
    text = ""
    for at, message in enumerate(messages):
        is_reply = message["role"] == "assistant"
        text += ("\n\n" if at and not is_reply else "") + message["content"]
    return text
