"""Text of tokens as it grows: together always what `tokenizer.decode` makes of all of them.

A later token may change the text of earlier ones: bytes become a character, and with byte fallback one byte too many
turns all bytes of a run into replacement characters. Text is returned when no later token can change it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes bytes to that are no character."""

_UTF_8 = codecs.getincrementaldecoder("utf-8")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT_FREE = re.compile(r"|WordPiece,|(Metaspace,|(Replace,)*)(ByteFallback,)?(Fuse,(Strip,)?)?")
"""Steps of decoders that decode a token in the same way after any others, but for the first token and runs of bytes."""


@dataclass(frozen=True)
class TokenTexts:
    """Texts and bytes of the single tokens of a tokenizer. Thread-safe."""

    backend: tokenizers.Tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False) if ids else ""  # some decoders panic

    def of(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of a token that is not the first: with SentencePiece, the text keeps its leading space."""
        if (pair := self._cache.get(token)) is None:
            pair = self._cache[token] = self._find(token)
        return pair

    def byte(self, token: int) -> int | None:
        """The byte that a token of byte fallback stands for; None for other tokens."""
        if not self._has_fallback:
            return None
        match = _BYTE.fullmatch(self.backend.id_to_token(token) or "")
        return int(match[1], 16) if match else None

    def exists(self, token: int) -> bool:
        """Whether the tokenizer has the token; a model may have more than its tokenizer."""
        return self.backend.id_to_token(token) is not None

    @cached_property
    def bytes_of_characters(self) -> dict[str, int]:
        """Byte of each character in the tokens of a byte-level tokenizer; empty for others."""
        if self.steps != ("ByteLevel",):
            return {}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """Types of the decoder's steps."""
        return tuple(step["type"] for step in self._decoders)

    @cached_property
    def is_context_free(self) -> bool:
        """Whether `of` is a token's text after any others, but for runs of byte-fallback tokens."""
        ends = any(step["type"] == "Strip" and step["stop"] for step in self._decoders)
        return not ends and _CONTEXT_FREE.fullmatch("".join(f"{step}," for step in self.steps)) is not None

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = self.backend.decoder
        return _flat(json.loads(decoder.__getstate__())) if decoder is not None else []

    @cached_property
    def _has_fallback(self) -> bool:
        return "ByteFallback" in self.steps

    @cached_property
    def _cache(self) -> dict[int, tuple[str, bytes]]:
        return {}

    def _find(self, token: int) -> tuple[str, bytes]:
        if self.bytes_of_characters:
            raw = self._bytes(self.backend.id_to_token(token) or "")
            return raw.decode(errors="replace"), raw
        if (byte := self.byte(token)) is not None:
            return bytes([byte]).decode(errors="replace"), bytes([byte])
        text = self.decode([token, token])[len(self.decode([token])) :]
        return text, text.encode()

    def _bytes(self, raw: str) -> bytes:
        try:
            return bytes(self.bytes_of_characters[character] for character in raw)
        except KeyError:  # an added token
            return raw.encode()


class PythonTexts(TokenTexts):
    """Texts of a tokenizer of transformers that is written in Python: any token may change the text of others."""

    @override
    def exists(self, token: int) -> bool:
        return True

    @cached_property
    @override
    def _decoders(self) -> list[dict[str, Any]]:
        return [{"type": "Python"}]


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


class _Text(Protocol):
    """The text of one sequence."""

    starts: list[int]
    """Characters before each token's text, of the tokens for which this is final."""
    length: int
    """Characters returned."""

    def add(self, token: int) -> str:
        """Add a token and return the text that is final by it."""
        ...

    def skip(self) -> None:
        """Add a token without text."""
        ...

    def end(self) -> str:
        """The remaining text."""
        ...


@dataclass
class _ByteText(_Text):
    """Byte-level tokens: bytes that are decoded together."""

    texts: TokenTexts
    starts: list[int] = field(default_factory=list)
    length: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF_8("replace"))

    @override
    def add(self, token: int) -> str:
        raw = self.texts.of(token)[1]
        was_open = bool(self._decoder.getstate()[0])
        first = self._decoder.decode(raw[:1])
        # An open character that the first byte does not continue ends before this token.
        is_after = was_open and bool(first) and (len(first) > 1 or bool(self._decoder.getstate()[0]))
        self.starts.append(self.length + is_after)
        return self._count(first + self._decoder.decode(raw[1:]))

    @override
    def skip(self) -> None:
        self.starts.append(self.length)

    @override
    def end(self) -> str:
        return self._count(self._decoder.decode(b"", final=True))

    def _count(self, text: str) -> str:
        self.length += len(text)
        return text


@dataclass
class _PieceText(_Text):
    """Tokens whose texts do not depend on others, and runs of byte-fallback tokens."""

    texts: TokenTexts
    has_begun: bool
    """There is text before: a decoder may change the first of it."""
    starts: list[int] = field(default_factory=list)
    length: int = 0
    _head: list[int] = field(default_factory=list)
    """Tokens before the first text."""
    _run: list[int] = field(default_factory=list)
    """Byte tokens since the last other token."""
    _places: list[int] = field(default_factory=list)
    """Bytes of the run before each token that is not in `starts`."""

    @override
    def add(self, token: int) -> str:
        if self.texts.byte(token) is not None:
            self._places.append(len(self._run))
            self._run.append(token)
            return ""
        text = self._end_run()
        self.starts.append(self.length)
        return text + self._append([token], self.texts.of(token)[0])

    @override
    def skip(self) -> None:
        if self._run:
            self._places.append(len(self._run))
        else:
            self.starts.append(self.length)

    @override
    def end(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        if not self._run:
            return ""
        raw = bytes(self.texts.byte(token) or 0 for token in self._run)
        try:
            text, offsets = raw.decode(), _character_offsets(raw)
        except UnicodeDecodeError:  # none of the bytes stands for a character, as the tokenizers library decides
            text, offsets = REPLACEMENT * len(raw), list(range(len(raw) + 1))
        before, whole = self.length, len(text)
        text = self._append(self._run, text)
        self.starts += [before + max(0, offsets[place] - (whole - len(text))) for place in self._places]
        self._run, self._places = [], []
        return text

    def _append(self, ids: list[int], text: str) -> str:
        """Add the tokens, which have `text` unless they are the first."""
        if not self.has_begun:
            self._head += ids
            text = self.texts.decode(self._head)
            self.has_begun = bool(text)
        self.length += len(text)
        return text


def _character_offsets(raw: bytes) -> list[int]:
    """Character in which each byte lies, and their number."""
    offsets, characters = [], 0
    for byte in raw:
        characters += byte & 0xC0 != 0x80
        offsets.append(characters - 1)
    return [*offsets, characters]


@dataclass
class _WholeText(_Text):
    """Tokens whose text is known at the end only, because any token may change the text of others."""

    texts: TokenTexts
    starts: list[int] = field(default_factory=list)
    length: int = 0
    _ids: list[int] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)

    @override
    def add(self, token: int) -> str:
        self.skip()
        self._ids.append(token)
        return ""

    @override
    def skip(self) -> None:
        self._places.append(len(self._ids))

    @override
    def end(self) -> str:
        text = self.texts.decode(self._ids)
        self.length = len(text)
        self.starts = [min(len(self.texts.decode(self._ids[:place])), self.length) for place in self._places]
        return text


class Detokenizer:
    """Incremental detokenization that skips the ids in `hidden`. With `has_begun`, the text continues another."""

    def __init__(self, texts: TokenTexts, hidden: frozenset[int] = frozenset(), *, has_begun: bool = False) -> None:
        self._texts, self._hidden = texts, hidden
        self._text: _Text
        if texts.bytes_of_characters:
            self._text = _ByteText(texts)
        elif texts.is_context_free:
            self._text = _PieceText(texts, has_begun)
        else:
            self._text = _WholeText(texts)

    @property
    def starts(self) -> Sequence[int]:
        """Characters before each token's text, of as many of the first tokens as this is final for."""
        return self._text.starts

    @property
    def length(self) -> int:
        """Characters of the text up to now."""
        return self._text.length

    def feed(self, token: int) -> str:
        """Add a token; returns the text that is final by it."""
        if token in self._hidden or not self._texts.exists(token):
            self._text.skip()
            return ""
        return self._text.add(token)

    def end(self) -> str:
        """The remaining text after the last token."""
        return self._text.end()
