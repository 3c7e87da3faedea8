"""Encode chats with a model's tokenizer and chat template, for prompts and for demonstrations to train on.

Sampled tokens are never re-encoded: a Turn within a conversation stands for its own tokens, so the next prompt extends
the previous one token by token. A chat template defines the whole prompt: no special token is added around its output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from tinsmith.chat.choice_decoder import ChoiceDecoder, StopStrings
from tinsmith.chat.detokenizer import Detokenizer, TokenTexts
from tinsmith.chat.rendering import in_form, render_template
from tinsmith.chat.strict_json import check_text
from tinsmith.chat.templates import NAMES, chat_template
from tinsmith.chat.tokenizer import special_token_ids, token_texts
from tinsmith.errors import BadRequest, ConfigError, Unsupported, UserError
from tinsmith.rl.policy.images import ImageEncoder
from tinsmith.rl.types import EncodedPrompt, Image, Message, Turn

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Template tag around the assistant's tokens."""

_PLACEHOLDER = "\ue000reply\ue001"
"""Stands for a reply's tokens in a rendered chat: private-use characters that no text contains."""

Messages = Sequence[Message | Turn]
"""A chat so far; a Turn is an assistant message with its sampled tokens."""


class ChatCodec(Protocol):
    """Encodes chats as tokens; `chat.Chat` implements it with a tokenizer and its chat template."""

    @property
    def template(self) -> str:
        """The chat template; empty if there is none."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold images."""
        return False

    @property
    def image_refusal(self) -> Unsupported:
        """The error for images that are not taken."""
        return Unsupported("The model takes no images.", "Use a vision-language model, or remove the images.")

    def with_template_values(self, values: Mapping[str, Any]) -> ChatCodec:
        """Return a codec whose chat template also gets these variables."""
        ...

    def encode(self, conversation: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> EncodedPrompt:
        """Encode a conversation, with the beginning of the next reply."""
        ...

    def prompt(self, conversation: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of `encode`, for callers that cannot pass images on. Raises Unsupported if there are any."""
        return text_tokens(self.encode(conversation, tools))

    def encode_with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat and their loss mask: its last message, the assistant's."""
        ...

    def encode_every_reply(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[tuple[list[int], list[bool]]]:
        """Return rows of tokens with loss masks that cover each assistant message once, in its own context.

        There is one row, unless the template renders a reply differently once others follow, without its reasoning for
        example: then the replies before the change have rows of their own.
        """
        rows: list[tuple[list[int], list[bool]]] = []
        for at in [at for at, message in enumerate(messages) if message.role == "assistant"] or [len(messages) - 1]:
            tokens, mask = self.encode_with_loss_mask(messages[: at + 1], tools)
            earlier, earlier_mask = rows[-1] if rows else ([], [])
            if rows and tokens[: len(earlier)] == earlier:
                rows[-1] = (tokens, [*earlier_mask, *mask[len(earlier) :]])
            else:
                rows.append((tokens, mask))
        return rows

    def encode_text(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        ...

    def encode_document(self, text: str) -> list[int]:
        """Encode text with the special tokens that the tokenizer puts around it, such as one for its beginning."""
        return self.encode_text(text)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer to a folder, for programs that read it from one."""
        raise NotImplementedError

    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None, keep: Sequence[str] = ()) -> str:
        """Decode a reply, without its stop string and without special tokens except those in `keep`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special tokens included."""
        ...

    def token_text(self, token: int) -> str:
        """Text of a token that is not the first."""
        return self.decode([token])


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a reward model scores a reply: by the odds of a token, the first of `answer`, after the reply and `question`.

    Example: Verdict(question="Is the reply good?", answer="Yes")
    """

    question: str
    answer: str

    def tokens(self, chat: ChatCodec, messages: Messages) -> list[int]:
        """The tokens of a chat that ends with the reply, with the question and the token of the answer."""
        answer = chat.encode_text(self.answer)[:1]
        return [*chat.prompt([*messages, Message(role="user", content=self.question)]), *answer]


QUESTION, ANSWER = "Is this a good reply? Answer Yes or No.", "Yes"
"""The question and the answer of reward models, where none are set."""


class Chat(ChatCodec):
    """One model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Any,
        template: str = "",
        values: Mapping[str, Any] | None = None,
        images: ImageEncoder | Unsupported | None = None,
    ) -> None:
        """`tokenizer` is a transformers tokenizer; `template` replaces its own; `values` are template variables.

        `images` gives images their tokens; for a model that takes none, the error for them, or None.
        """
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template
        self._values = dict(values or {})
        self._images = None if isinstance(images, Unsupported) else images
        self._image_refusal = images if isinstance(images, Unsupported) else None

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self._tokenizer)

    @override
    def save_tokenizer(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    @property
    @override
    def template(self) -> str:
        """The chat template; empty if there is none. Of several templates, the one for tools."""
        if isinstance(self._template, Mapping):
            return str(self._template.get("tool_use") or self._template.get("default") or "")
        return str(self._template or "")

    @property
    @override
    def takes_images(self) -> bool:
        return self._images is not None

    @property
    @override
    def image_refusal(self) -> Unsupported:
        return self._image_refusal or Unsupported(
            f"The tokenizer {self._tokenizer.name_or_path} has no image processor or no chat template that takes "
            "images.",
            "Use a vision-language model, or set model.tokenizer to one with its preprocessor_config.json.",
        )

    @override
    def with_template_values(self, values: Mapping[str, Any]) -> Chat:
        return Chat(self._tokenizer, self._template, {**self._values, **values}, self._images or self._image_refusal)

    @override
    def encode(self, conversation: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> EncodedPrompt:
        """The conversation and the start of a reply; a final assistant message begins the reply.

        Without a template, messages are joined as plain text. Raises UserError if the template rejects the messages,
        Unsupported for images that the model does not take.
        """
        last = max((at for at, part in enumerate(conversation) if isinstance(part, Turn)), default=-1)
        if last < 0:
            return self._encode(conversation, tools)
        turn, after = conversation[last], conversation[last + 1 :]
        assert isinstance(turn, Turn)
        tokens = (*turn.prompt, *turn.tokens)
        if not after:
            return EncodedPrompt(tokens=tokens, images=turn.images)
        parts = [*conversation[:last], Message(role="assistant", content=_PLACEHOLDER), *after]
        _, placeholder, tail = self._render(parts, tools).rpartition(_PLACEHOLDER)
        if not placeholder:  # the template omits this reply, as some do with earlier ones
            return self._encode(conversation, tools)
        ids = self.encode_text(tail)
        added = self._with_images(ids[turn.tokens[-1:] == tuple(ids[:1]) :], after, start=len(tokens))
        return EncodedPrompt(tokens=tokens + added.tokens, images=turn.images + added.images)

    @override
    def encode_with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[bool]]:
        """(token ids of a whole chat, mask of the tokens of its last message).

        The template's {% generation %} tags define the mask; without them it covers what the template writes after the
        start of a reply, up to the end-of-sequence token. Raises UserError if the last message is not the assistant's.
        """
        if any(message.images for message in messages):
            raise Unsupported("Chats to train on take no images.", "Train on tasks with images, or remove the images.")
        if not messages or messages[-1].role != "assistant":
            raise UserError(
                "A chat to train on must end with the assistant.", "Add an assistant message, or remove the row."
            )
        if _GENERATION.search(self.template):
            return self._encode_by_tags(messages, tools)
        earlier = messages[:-1]
        before = self._render(earlier, tools) if earlier else ""
        whole = self._render(messages, tools, begin_reply=False)
        if not whole.startswith(before):  # the template starts a reply differently than it renders a finished one
            before = self._render(earlier, tools, begin_reply=False) if earlier else ""
        prompt, reply = self.encode_text(before), self.encode_text(whole[len(before) :])
        end = self._end_of(reply)
        return prompt + reply, [*[False] * len(prompt), *[True] * end, *[False] * (len(reply) - end)]

    def _end_of(self, reply: Sequence[int]) -> int:
        """Length of a rendered reply up to and including its end-of-sequence token."""
        ends = [at for at, token in enumerate(reply) if token == self._tokenizer.eos_token_id]
        return ends[-1] + 1 if ends else len(reply)

    def _encode_by_tags(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        encoded = self._tokenizer.apply_chat_template(
            in_form(self._tokenizer, self.template, [_message_json(message) for message in messages], tools),
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._values,
        )
        mask = [bool(flag) for flag in encoded["assistant_masks"]]
        last = max((at for at, flag in enumerate(mask) if flag), default=-1)
        first = next((at for at in range(last, -1, -1) if not mask[at]), -1)
        return list(encoded["input_ids"]), [at > first and flag for at, flag in enumerate(mask)]

    @override
    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens. Raises BadRequest for half a surrogate pair."""
        try:
            check_text(text)
        except ValueError as error:
            raise BadRequest(f"A text cannot be encoded: {error}.", "Give Unicode text.") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @override
    def encode_document(self, text: str) -> list[int]:
        _ = self.encode_text(text)  # refuses what is no text
        return list(self._tokenizer.encode(text))

    @override
    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None, keep: Sequence[str] = ()) -> str:
        """Text of a reply up to a stop string, without special tokens other than those in `keep`."""
        hidden = self._special_ids - {self._tokenizer.convert_tokens_to_ids(token) for token in keep}
        stops = [text for text in stop or () if isinstance(text, str)]
        if not stops:
            return self._texts.decode([token for token in tokens if token not in hidden])
        decoder = ChoiceDecoder(
            detokenizer=Detokenizer(self._texts, hidden),
            stops=StopStrings(stops, Detokenizer(self._texts, has_begun=True)),
        )
        return decoder.feed(tokens).text + decoder.end().text

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens included; an image is one placeholder."""
        shown = list(tokens) if self._images is None else self._images.shortened(tokens)
        return self._texts.decode(shown)

    @override
    def token_text(self, token: int) -> str:
        return self._texts.of(token)[0]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return special_token_ids(self._tokenizer)

    @cached_property
    def _texts(self) -> TokenTexts:
        return token_texts(self._tokenizer)

    def _encode(self, conversation: Messages, tools: Sequence[Mapping[str, Any]]) -> EncodedPrompt:
        text = self._render(conversation, tools)
        return self._with_images(
            self.encode_text(text) if self.template else self._tokenizer.encode(text), conversation
        )

    def _with_images(self, ids: Sequence[int], parts: Messages, start: int = 0) -> EncodedPrompt:
        """Rendered tokens, the first at position `start`, with the images of the messages in place."""
        images = [image for part in parts if isinstance(part, Message) for _, image in part.images]
        if self._images is not None and self.template:
            return self._images.place(ids, images, start)
        if images:
            raise self.image_refusal
        return EncodedPrompt(tokens=tuple(ids))

    def _render(self, conversation: Messages, tools: Sequence[Mapping[str, Any]], *, begin_reply: bool = True) -> str:
        """The chat as text; `begin_reply` ends it where a reply begins."""
        messages = [_message_json(part) for part in conversation]
        if not self.template:
            return _join(messages)
        continues = begin_reply and messages[-1]["role"] == "assistant"
        return render_template(
            self._tokenizer,
            messages,
            tools,
            template=self.template,
            add_generation_prompt=begin_reply and not continues,
            continue_final_message=continues,
            values=self._values,
        )


def read_template(text: str) -> str:
    """The chat template of a run file: Jinja, the path of a file that holds it, or `hermes`. Raises ConfigError."""
    if not text or "{" in text:
        return text
    if text in NAMES:
        return chat_template(text)
    file = Path(text).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"model.chat_template: there is no file {file}.", f"Set a path, the template itself, or {', '.join(NAMES)}."
        )
    return file.read_text(encoding="utf-8")


def _message_json(part: Message | Turn) -> dict[str, Any]:
    if isinstance(part, Turn):
        return {"role": "assistant", "content": part.text}
    return {"role": part.role, "content": _content(part.content, part.images), **part.more}


def _content(text: str, images: Sequence[tuple[int, Image]]) -> str | list[dict[str, str]]:
    """The text or, with images, the parts that templates of vision-language models read."""
    if not images:
        return text
    parts, end = list[dict[str, str]](), 0
    for at, _ in images:
        parts += [{"type": "text", "text": text[end:at]}] if at > end else []
        parts.append({"type": "image"})
        end = max(end, at)
    return [*parts, *([{"type": "text", "text": text[end:]}] if text[end:] else [])]


def _join(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as plain text, with an empty line before every message but replies."""
    text = ""
    for at, message in enumerate(messages):
        is_reply = message["role"] == "assistant"
        text += ("\n\n" if at and not is_reply else "") + message["content"]
    return text


def text_tokens(prompt: EncodedPrompt) -> list[int]:
    """The token ids of a prompt without images. Raises Unsupported."""
    if prompt.images:
        raise Unsupported(
            "This environment, reward or workflow reads token ids and takes no images.",
            "Remove the images from the task, or use the workflow single_turn, multi_turn, custom or agent.",
        )
    return list(prompt.tokens)
