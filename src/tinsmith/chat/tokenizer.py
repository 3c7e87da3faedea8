"""Tokenizers of the served models: encoding, decoding and chat templates, without torch.

Loading takes seconds and rendering a template milliseconds, so both belong in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.atomic import shared_folder
from tinsmith.chat.detokenizer import Detokenizer, PythonTexts, TokenTexts
from tinsmith.chat.rendering import render_template
from tinsmith.errors import BadRequest, Unsupported

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "characters:"
"""Prefix of a source without files: `characters:N` is a tokenizer whose N token ids are the first N code points."""

NFC_SHRINK = 4
"""NFC makes text at most 3 times shorter in UTF-8: three letters of Hangul become one."""

PLAIN_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "<tool_call>...</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template of the character tokenizer."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer and chat template of the model `name`. Thread-safe."""

    name: str
    tokenizer: PreTrainedTokenizerFast

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        return self.tokenizer.backend_tokenizer

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return special_token_ids(self.tokenizer)

    def token_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those of `texts` that are a single token."""
        numbers = (self._backend.token_to_id(text) for text in texts)
        return frozenset(number for number in numbers if number is not None)

    @cached_property
    def texts(self) -> TokenTexts:
        """Texts of single tokens."""
        return token_texts(self.tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises BadRequest for an unpaired surrogate."""
        return self._encoding(text, add_special_tokens).ids

    def encode_with_starts(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Token ids of `text`, and the character of `text` at which each begins. Errors are those of `encode`."""
        encoding, starts, end = self._encoding(text, add_special_tokens), [], 0
        for (start, stop), is_special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # A token that was added has no place; offsets of some tokenizers leave out spaces before a word.
            starts.append(end if is_special else min(start, end))
            end = end if is_special else max(stop, end)
        return encoding.ids, starts

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            # encode, unlike encode_batch, holds Python's lock: for a second per megabyte.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # the tokenizers library raises nothing more specific
            raise BadRequest("The text holds half a surrogate pair.", "Send Unicode text.") from error
        return encoding

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`; 0 where the tokenizer may drop or merge characters."""
        if self._longest is None:
            return 0
        shrink = 1 if self._backend.normalizer is None else NFC_SHRINK
        return len(text.encode(errors="replace")) // (shrink * self._longest)

    @cached_property
    def _longest(self) -> int | None:
        """Bytes of the longest token of a byte-level tokenizer that normalizes by NFC at most; None for others."""
        normalizer, pre_tokenizer = repr(self._backend.normalizer), repr(self._backend.pre_tokenizer)
        is_byte_level = bool(self.texts.bytes_of_characters)
        is_lossless = normalizer in ("None", "NFC()") and "Removed" not in pre_tokenizer and is_byte_level
        added = self._backend.get_added_tokens_decoder().values()
        if not is_lossless or any(token.lstrip or token.rstrip for token in added):
            return None
        lengths = [
            len(token) for token in self._backend.get_vocab(with_added_tokens=False)
        ]  # a character for each byte
        return max(*lengths, *(len(token.content.encode()) for token in added))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self.texts.decode(list(ids))

    def detokenizer(self, hidden: frozenset[int] = frozenset(), *, after: int | None = None) -> Detokenizer:
        """A detokenizer that skips the ids in `hidden`, of text that begins a sequence or follows the token `after`."""
        return Detokenizer(self.texts, hidden, has_begun=after is not None and self.texts.byte(after) is None)

    def template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The chat template. Raises Unsupported if there is none."""
        try:
            return self.tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] if tools else None)
        except ValueError as error:
            raise Unsupported(f"{self.name} has no chat template.", "Use /v1/completions with a prompt.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, **options: Any) -> list[int]:
        """Token ids of a conversation; parameters and errors are those of `render_text`."""
        return self.encode(self.render_text(messages, tools, **options), add_special_tokens=False)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        values: Mapping[str, Any],
    ) -> str:
        """Text of a conversation in the model's template; `values` are variables of the chat template.

        Raises BadRequest for values that the template does not read and for messages that it rejects.
        """
        self._check_values(self.template(tools), values)
        return render_template(
            self.tokenizer,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            values=values,
            owner=f" of {self.name}",
        )

    def _check_values(self, template: str, values: Mapping[str, Any]) -> None:
        words = set(re.findall(r"[A-Za-z_]\w*", template))
        reserved = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        for key in values:
            if key in reserved or key not in words:
                raise BadRequest(
                    f"chat_template_kwargs.{key} is not read by the chat template of {self.name}.",
                    "Remove the key.",
                    field="chat_template_kwargs",
                )


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens of a transformers tokenizer."""
    return frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)


def token_texts(tokenizer: Any) -> TokenTexts:
    """Texts of the single tokens of a transformers tokenizer."""
    return TokenTexts(tokenizer.backend_tokenizer) if tokenizer.is_fast else PythonTexts(tokenizer)


class TokenizerCache:
    """The tokenizers of one server, loaded on first use."""

    def __init__(self) -> None:
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._turn = asyncio.Lock()

    async def get(self, name: str, source: str) -> Tokenizer:
        """The tokenizer of the model `name`, read from `source`. Raises Unsupported."""
        task = self._loading.get(source)
        if task is None or (task.done() and task.exception() is not None):
            task = self._loading[source] = asyncio.create_task(self._load(name, source))
        return await asyncio.shield(task)

    async def _load(self, name: str, source: str) -> Tokenizer:
        async with self._turn:  # transformers' lazy modules cannot be imported by several threads at once
            return await asyncio.to_thread(load_tokenizer, name, source)


def load_tokenizer(name: str, source: str) -> Tokenizer:
    """Load the tokenizer of the model `name` from a folder, a cached hub id, or `characters:N`. Raises Unsupported."""
    if source.startswith(CHARACTERS):
        return Tokenizer(name, _character_tokenizer(int(source.removeprefix(CHARACTERS))))
    from transformers import PreTrainedTokenizerFast  # takes seconds and 60 MB, which only these routes need

    try:
        return Tokenizer(name, PreTrainedTokenizerFast.from_pretrained(source, local_files_only=True))
    except (OSError, ValueError) as error:
        raise Unsupported(
            f"{name} has no tokenizer.json, so this server cannot convert text to tokens: {error}",
            "Use the Tinker API or /inference/v1/generate, which take tokens.",
        ) from error


def write_character_tokenizer(source: str, cache: Path) -> Path:
    """Folder in `cache` with the tokenizer `characters:N`, for clients of this machine; written once."""
    folder = cache / f"character-tokenizer-{source.removeprefix(CHARACTERS)}"
    if not folder.is_dir():
        with shared_folder(folder) as written:
            _character_tokenizer(int(source.removeprefix(CHARACTERS))).save_pretrained(written)
    return folder


def _character_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token id = code point; id 2 is the end-of-sequence token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({chr(number): number for number in range(vocab_size)}, unk_token="?")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([chr(2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=chr(2), chat_template=PLAIN_TEMPLATE)
