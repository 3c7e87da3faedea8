"""Refusals of a translated file in the words of the file: its keys in place of RunConfig's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tinsmith.dialects.base import Copied, Section, Translated, keys
from tinsmith.overrides import COMMAND_LINE
from tinsmith.rl.config import RunConfig
from tinsmith.settings import paths, without_entries

_KEY = r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*"
_COMPOUND = re.compile(r"\b[a-z][a-z0-9]*(?:[._][a-z0-9]+)+\b")
_WORD = re.compile(
    r"\b(?:set|leave out|lower|raise|or) (?P<advised>[a-z]+)\b(?![.\w])|'(?P<quoted>[a-z]+)'"
    r"|(?:^|\b)(?P<subject>[a-z]+)(?= (?:is missing|is not used|\d))"
)
"""Keys of one word, where a sentence names a key and not the thing."""


def in_words_of(schema: type[Section], values: Mapping[str, Any], message: str) -> str:
    """The message with keys of the schema in place of RunConfig's, in lines that are not about the command line."""
    names = _names(schema, values)
    return "\n".join(line if line.startswith(COMMAND_LINE) else _replaced(line, names) for line in message.splitlines())


def _replaced(line: str, names: Mapping[str, str]) -> str:
    place, mark, sentence = line.partition("): ")
    begin, text = (f"{place}{mark}", sentence) if mark else ("", line)
    text = _WORD.sub(lambda match: _word(match, names), text)
    return begin + _COMPOUND.sub(lambda match: names.get(match[0], match[0]), text)


def _word(match: re.Match[str], names: Mapping[str, str]) -> str:
    key = match["advised"] or match["quoted"] or match["subject"]
    return match[0].replace(key, names.get(key, key))


def _names(schema: type[Section], values: Mapping[str, Any]) -> dict[str, str]:
    """Key of RunConfig -> the key of the schema that becomes it; one that the file sets before others."""
    own = {without_entries(path) for path in paths(RunConfig)}
    names: dict[str, str] = {}
    for key in sorted(keys(schema), key=lambda key: not _is_set(values, key.path)):
        for target in _targets(key.fate):
            if target in own and not any(path.startswith(f"{target}.") for path in own):
                names.setdefault(target, key.path)
    return names


def _targets(fate: Any) -> Iterator[str]:
    if isinstance(fate, Copied):
        yield fate.to
    elif isinstance(fate, Translated):
        yield from re.findall(rf"^{_KEY}|(?<=, ){_KEY}", fate.becomes)


def _is_set(values: Any, path: str) -> bool:
    for part in path.replace("[]", ".0").split("."):
        if isinstance(values, list) and values and part == "0":
            values = values[0]
        elif isinstance(values, Mapping) and part in values:
            values = values[part]
        else:
            return False
    return True
