"""The combinations of a sweep: `key=value` words, some with several values.

Values are separated by commas, and a..b is the whole numbers from a to b. Commas inside of quotes and brackets belong
to a value: sampling.stop=[a,b] is one list.

Example: combinations(["steps=20", "optimizer.learning_rate=1e-4,3e-4", "seed=0..2"]) are six.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinsmith.errors import ConfigError
from tinsmith.overrides import override_key

MAX_COMBINATIONS = 1000
_LONGEST_NAME = 100
_FIXED = {
    "folder": "each run has a folder of its own; set --out for the folder of the sweep",
    "name": "each run is named after its values",
    "resume": "the same command resumes a sweep",
    "resume_from": "set model.load_from to start each run from the same weights",
    "mode": "the runs of a sweep sample and train",
    "service": "all runs share one service",
    "model.base_url": "set --server for each server",
    "model.api_key_env": "all runs use the same key",
    "time_limit": "set --time-limit for the sweep",
}
"""Keys that a sweep cannot vary, and why."""
_NOT_SET = ("folder", "name", "resume", "resume_from", "mode", "time_limit")
"""Those that its words cannot set at all."""
_OPEN, _CLOSED, _QUOTES = "[{(", "]})", "'\""


@dataclass(frozen=True, slots=True)
class Combination:
    """One run of a sweep: its overrides, and the values by which it differs from the others.

    Example: Combination(("steps=20", "model.rank=8", "seed=1"), {"model.rank": "8", "seed": "1"}, "rank=8,seed=1",
    "rank=8")
    """

    overrides: tuple[str, ...]
    values: Mapping[str, str]
    name: str
    """Of its folder and in tables."""
    setting: str
    """Its name without its seeds: runs of one setting are averaged."""


def combinations(words: Sequence[str]) -> list[Combination]:
    """Every combination of the values, the last key changing fastest. Raises ConfigError that quotes the word."""
    choices = [_choices(word) for word in words]
    varied = [(override_key(word), values) for word, values in zip(words, choices, strict=True) if len(values) > 1]
    for word, values in zip(words, choices, strict=True):
        _check_key(override_key(word), word, varied=len(values) > 1)
    if twice := [key for key, count in Counter(key for key, _ in varied).items() if count > 1]:
        raise ConfigError(f"{twice[0]} has several values twice.", f"Write all of them in one word: {twice[0]}=a,b,c.")
    if not varied:
        raise ConfigError(
            "A sweep needs a setting with several values.",
            "Example: tinsmith sweep run.yaml optimizer.learning_rate=1e-4,3e-4 seed=0..2. For one run: tinsmith run.",
        )
    if (count := math.prod(len(values) for _, values in varied)) > MAX_COMBINATIONS:
        raise ConfigError(f"These are {count:,} runs; a sweep has at most {MAX_COMBINATIONS:,}.", "Give fewer values.")
    made = []
    for chosen in itertools.product(*choices):
        pairs = [(override_key(word), text) for word, text in zip(words, chosen, strict=True)]
        values = {key: text for key, text in pairs if key in dict(varied)}
        overrides = tuple(
            f"{key}={text}" if key in values else word for word, (key, text) in zip(words, pairs, strict=True)
        )
        name, setting = _name(values), _name({key: text for key, text in values.items() if not is_seed(key)})
        made.append(Combination(overrides, values, name, setting))
    return made


def is_seed(key: str) -> bool:
    """Whether the values of a key are repetitions of one experiment."""
    return _last(key) == "seed"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """What each key is called among these: its last part, unless another one has it too."""
    keys = list(keys)
    last = Counter(_last(key) for key in keys)
    return {key: key if last[_last(key)] > 1 else _last(key) for key in keys}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _check_key(key: str, word: str, *, varied: bool) -> None:
    for fixed, why in _FIXED.items():
        if (key == fixed or key.startswith(f"{fixed}.")) and (varied or fixed in _NOT_SET):
            raise ConfigError(
                f"'{word}': a sweep cannot {'vary' if varied else 'set'} {fixed}: {why}.", "Leave it out."
            )


def _choices(word: str) -> list[str]:
    """The values of a word; one without an equals sign is left to whoever applies it."""
    if "=" not in word:
        return [word]
    key, _, text = word.partition("=")
    parts = _split(text)
    if len(parts) == 1 and not _range(parts[0], word):
        return [text]
    values = [value for part in parts for value in _range(part.strip(), word) or [part.strip()]]
    if "" in values:
        raise ConfigError(f"'{word}' has an empty value.", f"Write {key}=a,b, or quotes around a text with a comma.")
    if twice := [value for value, count in Counter(values).items() if count > 1]:
        raise ConfigError(f"'{word}' has the value {twice[0]} twice.", "Give each value once.")
    return values


def _split(text: str) -> list[str]:
    """The parts between commas that are outside of quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES and not parts[-1].strip(" [{(,:"):
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSED:
            depth -= 1
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _range(text: str, word: str) -> list[str]:
    """The numbers of a..b; none if the text is no range."""
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text.strip())
    if match is None:
        return []
    low, high = int(match[1]), int(match[2])
    if high < low:
        raise ConfigError(f"'{word}': {text.strip()} has no number.", f"Write the smaller number first: {high}..{low}.")
    if high - low >= MAX_COMBINATIONS:
        raise ConfigError(f"'{word}': {text.strip()} has more than {MAX_COMBINATIONS:,} numbers.", "Give fewer values.")
    return [str(number) for number in range(low, high + 1)]


def _name(values: Mapping[str, str]) -> str:
    """A name of the values that is also one of a folder, and differs for different values."""
    exact = ",".join(f"{name}={values[key]}" for key, name in short_names(values).items())
    plain = re.sub(r"[^A-Za-z0-9._+=,-]+", "_", exact)
    if plain == exact and len(exact) <= _LONGEST_NAME:
        return exact or "all"
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
