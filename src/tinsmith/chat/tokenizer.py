"""Text <-> tokens of the served models, by their own tokenizers and chat templates. Torch is not needed for it.

A source without a tokenizer, the fake engine's, spells one character a token. Loading and rendering take milliseconds
to seconds and belong in a thread; growing a text by a token takes microseconds.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tinsmith.engine.base import ModelCard
from tinsmith.errors import BadRequest, Unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes half a character to."""

PLAIN_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "<tool_call>...</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models that spell characters."""


@dataclass(frozen=True)
class Words:
    """One model's tokenizer and chat template. Every method may be called from several threads at once."""

    name: str
    tokenizer: PreTrainedTokenizerFast

    @property
    def _tokens(self) -> Tokenizer:
        return self.tokenizer.backend_tokenizer

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that are marks and not text."""
        added = self._tokens.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def marks(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those of these texts that are one token."""
        found = (self._tokens.token_to_id(text) for text in texts)
        return frozenset(number for number in found if number is not None)

    def spelled(self, token: int) -> tuple[str, bytes | None]:
        """One token by itself as text, and as the bytes that it stands for; None if the tokenizer does not say."""
        text = self._tokens.decode([token], skip_special_tokens=False)
        if HALF not in text:
            return text, text.encode()
        raw = self._tokens.id_to_token(token) or ""
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", raw)) is not None:
            return text, bytes.fromhex(byte[1])
        if self._bytes and all(character in self._bytes for character in raw):
            return text, bytes(self._bytes[character] for character in raw)
        return text, None

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """Character -> byte, of tokenizers that write bytes as characters."""
        if "ByteLevel" not in repr(self._tokens.decoder):
            return {}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}

    def encode(self, text: str, *, marked: bool) -> list[int]:
        """`marked`: with what the tokenizer itself puts around a text. Raises BadRequest for half a surrogate pair."""
        try:
            return self._tokens.encode(text, add_special_tokens=marked).ids
        except TypeError as error:  # the tokenizer knows no other word for it
            raise BadRequest("The text holds half a surrogate pair.", "Send Unicode text.") from error

    def decode(self, ids: Iterable[int]) -> str:
        """All of it, marks too."""
        return self._tokens.decode(list(ids), skip_special_tokens=False)

    def growing(self, hidden: frozenset[int]) -> Growing:
        """A text that begins empty; ids in `hidden` leave nothing in it."""
        return Growing(self._tokens, hidden)

    def template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The chat template. Raises Unsupported."""
        try:
            return self.tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] if tools else None)
        except ValueError as error:
            raise Unsupported(f"{self.name} has no chat template.", "Use /v1/completions with a prompt.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        begin: bool,
        go_on: bool,
        values: Mapping[str, Any],
    ) -> list[int]:
        """A conversation as the chat template has it. `begin` an answer, or `go_on` with the last message.

        Raises BadRequest for what the template does not take.
        """
        from jinja2 import TemplateError

        template = self.template(tools)
        self._check_values(template, values)
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=begin,
                continue_final_message=go_on,
                tokenize=False,
                **values,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise BadRequest(
                f"The chat template of {self.name} does not take these messages: {error}", "Change the messages."
            ) from error
        return self.encode(str(text), marked=False)

    def _check_values(self, template: str, values: Mapping[str, Any]) -> None:
        words = set(re.findall(r"[A-Za-z_]\w*", template))
        ours = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        for key in values:
            if key in ours or key not in words:
                raise BadRequest(
                    f"chat_template_kwargs.{key} is not read by the chat template of {self.name}.", "Leave it out."
                )


@dataclass
class Growing:
    """A text that grows by tokens and never ends within a character."""

    tokens: Tokenizer
    hidden: frozenset[int]
    ids: list[int] = field(default_factory=list)
    told: str = ""

    def __post_init__(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=False)

    def feed(self, ids: Iterable[int]) -> str:
        """What these tokens add to it; perhaps nothing yet."""
        new = []
        for number in ids:
            if number not in self.hidden:
                self.ids.append(number)
                new.append(self._stream.step(self.tokens, number) or "")
        text = "".join(new)
        self.told += text
        return text

    def end(self) -> str:
        """The rest, with a replacement character for half a character."""
        whole = self.tokens.decode(self.ids, skip_special_tokens=False)
        return whole[len(self.told) :] if whole.startswith(self.told) else ""


class TokenizerCache:
    """The tokenizers of one server, each loaded when it is first needed."""

    def __init__(self) -> None:
        self._loaded: dict[str, asyncio.Task[Words]] = {}

    async def get(self, name: str, card: ModelCard) -> Words:
        """The words of what is served as `name`. Raises Unsupported."""
        task = self._loaded.get(card.tokenizer)
        if task is None or (task.done() and task.exception() is not None):
            task = self._loaded[card.tokenizer] = asyncio.create_task(asyncio.to_thread(load, name, card))
        return await asyncio.shield(task)


def load(name: str, card: ModelCard) -> Words:
    """The words of a model on this machine. Raises Unsupported."""
    if card.tokenizer == card.source and card.arch == "fake" and not card.tokenizer.startswith("/"):
        return Words(name, _letters(card.vocab_size))
    from transformers import PreTrainedTokenizerFast  # seconds, and 60 MB that only these routes need

    try:
        return Words(name, PreTrainedTokenizerFast.from_pretrained(card.tokenizer, local_files_only=True))
    except (OSError, ValueError) as error:
        raise Unsupported(
            f"{name} has no tokenizer.json, so this server cannot turn text into tokens: {error}",
            "Use the Tinker API or /inference/v1/generate, which take tokens.",
        ) from error


def _letters(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token spells the character of its id; id 2 is the end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({chr(number): number for number in range(vocabulary)}, unk_token="?")
    letters = Tokenizer(model)
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens([chr(2)])
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=chr(2), chat_template=PLAIN_TEMPLATE)
