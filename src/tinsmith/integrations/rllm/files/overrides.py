"""Overrides in Hydra's syntax, as they follow the name of a training script.

    a.b=value    set a key        +a.b=value   add a key, or set it
    ~a.b         remove a key     rllm/backend=tinker   choose an entry of a group

A value is null, true, false, a number, a string with or without quotes, a list [a, b] or a mapping {a: b}. Where the
setting is a text, the value may be any text. Sweeps
(`a=1,2`), functions (`choice(1, 2)`) and package overrides (`a@b=c`) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from tinsmith.errors import ConfigError
from tinsmith.overrides import COMMAND_LINE, Form, forms_at, read_value

NOW = re.compile(r"\$\{now:([^}]*)\}")
"""Hydra's reference to the time of the start, in a format of strftime."""
_KEY = re.compile(r"[A-Za-z_]([\w.\-/\[\]]*[\w\]])?")
_NUMBER = re.compile(r"[+-]?((\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?|\d[\d_]*[eE][+-]?\d+|inf|nan)", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?(0|[1-9][\d_]*)")
_REFERENCE = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")
_SPECIAL = "[]{}'\""
_FUNCTION = re.compile(r"[A-Za-z_]\w*\(")
_WORDS: Mapping[str, Any] = {"null": None, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Override:
    """A parsed override.

    Example: Override(action="set", key="trainer.logger", value=["console", "wandb"])
    """

    action: Literal["set", "add", "remove"]
    key: str
    """Dotted key; the group `rllm/backend` is rllm.backend."""
    value: Any = None


def override_key(text: str) -> str:
    """The dotted key of an override, without `+` and `~`."""
    return text.partition("=")[0].lstrip("+~").replace("/", ".").replace("[", ".").replace("]", "")


class NotParsed(ConfigError, ValueError):
    """An override that is not in Hydra's syntax."""


def parse_override(text: str, kind: type[BaseModel] | None = None) -> Override:
    """Parse an override. `kind` says which settings are texts. Raises ConfigError that quotes it."""
    name, equals, value = text.partition("=")
    action: Literal["set", "add", "remove"] = (
        "remove" if name.startswith("~") else "add" if name.startswith("+") else "set"
    )
    bare = name.lstrip("~" if action == "remove" else "+")
    if "@" in bare:
        raise _refusal(text, "packages (@) are not supported", "Write the dotted key alone.")
    if not _KEY.fullmatch(bare) or not (equals or action == "remove"):
        raise _refusal(text, "it is not an override", "Write key=value, as in training.group_size=8.")
    key = override_key(name)
    if not equals:
        return Override(action, key)
    forms: Iterable[Form] = forms_at(kind, key.split(".")) if kind else ()
    return Override(action, key, read_value(key, value, forms, lambda value: _Parser(text, value).whole()))


def _refusal(text: str, problem: str, fix: str) -> NotParsed:
    return NotParsed(f"{COMMAND_LINE}: '{text}': {problem}.", fix)


class _Parser:
    """Reads one value from the text after the equals sign."""

    def __init__(self, override: str, text: str) -> None:
        self._override, self._text, self._at = override, text, 0

    def whole(self) -> Any:
        """The value, which ends at the end of the text."""
        value = self._value("")
        if self._next == ",":
            fix = "Give one value, or write a list: [a,b]."
            problem = "a sweep over several values is not supported"
            raise ConfigError(f"{COMMAND_LINE}: '{self._override}': {problem}.", fix)
        if self._next:
            raise self._unexpected()
        return value

    @property
    def _next(self) -> str:
        """The next character that is not a space; empty at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _unexpected(self) -> NotParsed:
        problem = f"unexpected '{self._next}'" if self._next else "it ends too early"
        return _refusal(self._override, problem, "Put quotes around a value with special characters.")

    def _value(self, closing: str) -> Any:
        """A value that ends at a comma, at `closing` or at the end."""
        match self._next:
            case "[":
                return self._items()
            case "{":
                return self._pairs()
            case "'" | '"':
                return self._quoted()
        return self._plain(closing)

    def _items(self) -> list[Any]:
        items: list[Any] = []
        self._at += 1
        while self._next != "]":
            items.append(self._value("]"))
            self._separator("]")
        self._at += 1
        return items

    def _pairs(self) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        self._at += 1
        while self._next != "}":
            key = self._quoted() if self._next in ("'", '"') else str(self._plain(":"))
            if self._next != ":":
                raise self._unexpected()
            self._at += 1
            pairs[key] = self._value("}")
            self._separator("}")
        self._at += 1
        return pairs

    def _separator(self, closing: str) -> None:
        if self._next == ",":
            self._at += 1
        elif self._next != closing:
            raise self._unexpected()

    def _quoted(self) -> str:
        quote, text = self._next, ""
        self._at += 1
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in (quote, "\\"):
                self._at += 1
                character = self._text[self._at]
            elif character == quote:
                self._at += 1
                return text
            text += character
            self._at += 1
        raise _refusal(self._override, "a quote is not closed", f"Add {quote} at its end.")

    def _plain(self, closing: str) -> Any:
        """A word without quotes, which a comma or `closing` ends; a reference `${…}` may contain both."""
        if _FUNCTION.match(self._text[self._at :].lstrip()):
            raise _refusal(self._override, "functions are not supported", "Write the value itself, or quote it.")
        text = ""
        while self._at < len(self._text):
            piece = self._text[self._at]
            if reference := _REFERENCE.match(self._text, self._at):
                piece = reference[0]
            elif piece == "," or piece in closing:
                break
            elif piece in _SPECIAL:
                raise self._unexpected()
            elif piece == "\\":
                self._at += 1
                piece = self._text[self._at : self._at + 1]
            text, self._at = text + piece, self._at + max(1, len(piece))
        if closing and not text.strip():
            raise self._unexpected()
        return _typed(text.strip())


def _typed(text: str) -> Any:
    """The value that a word without quotes stands for."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
