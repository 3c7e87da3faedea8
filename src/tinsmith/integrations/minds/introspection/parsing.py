"""Exact parsers of replies: what does not have the requested form has no value, and nothing is guessed.

A reply may begin with thoughts between <think> and </think>; only the text after them is parsed.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tinsmith.rl.scoring.notation import normalized
from tinsmith.rl.scoring.replies import after_thoughts, last_box

_NUMBER = re.compile(r"[-+−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"\d+", re.ASCII)
_SEPARATOR = re.compile(r"[\s,;]+")
_ARRAY = re.compile(r"\[([^\[\]]*)\]")
_MAX_DIGITS = 64
"""Longer numbers are not read."""


def exact_number(text: str) -> Fraction | None:
    """The number that the text is, with an optional sign (-, + or −), thousands separators and exponent."""
    text = text.strip()
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", "").replace("−", "-").removesuffix("."))


def number(text: str) -> float | None:
    """`exact_number` as a float; None if it is not finite."""
    value = exact_number(text)
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def number_array(text: str) -> tuple[float, ...] | None:
    """The numbers of the last [...] of the text; None if there is none, or an item is not a number."""
    arrays = _ARRAY.findall(text)
    if not arrays or not arrays[-1].strip():
        return None
    numbers = [number(item) for item in arrays[-1].split(",")]
    return None if None in numbers else tuple(value for value in numbers if value is not None)


def single_number(text: str) -> float | None:
    """The number that a reply is: bare, or the only item of its last [...]."""
    text = after_thoughts(text)
    if "[" not in text:
        return number(text)
    numbers = number_array(text)
    return numbers[0] if numbers and len(numbers) == 1 else None


def ranking(text: str, size: int) -> tuple[int, ...] | None:
    """The last [...] of a reply if it holds each of the integers 0 to size - 1 once; else None."""
    numbers = number_array(after_thoughts(text))
    if numbers is None or sorted(numbers) != list(range(size)):
        return None
    return tuple(map(int, numbers))


def integers(text: str, count: int, largest: int) -> tuple[int, ...] | None:
    """The integers that a reply consists of, if they are exactly `count`, each from 0 to `largest`; else None.

    They are separated by commas, semicolons or white space, and may stand in brackets. A reply with any other text has
    no value: the sequence could carry words.
    """
    text = after_thoughts(text)
    for begin, end in ("[]", "()"):
        if text.startswith(begin) and text.endswith(end):
            text = text[1:-1].strip()
    items = _SEPARATOR.split(text)
    if len(items) != count or not all(_INTEGER.fullmatch(item) and len(item) <= _MAX_DIGITS for item in items):
        return None
    values = tuple(map(int, items))
    return values if max(values) <= largest else None


def labelled(text: str, label: str) -> str | None:
    """The rest of the last line of a reply that begins with `LABEL:`, in any case; None if there is no such line."""
    lines = re.findall(
        rf"^[ \t]*{re.escape(label)}[ \t]*:[ \t]*(.*)$", after_thoughts(text), re.IGNORECASE | re.MULTILINE
    )
    return lines[-1].strip() if lines else None


def probability(text: str | None) -> float | None:
    """The number from 0 to 1 that the text is; None if it is something else."""
    value = number(text) if text else None
    return value if value is not None and 0.0 <= value <= 1.0 else None


def answer_number(text: str | None) -> Fraction | None:
    """The number that an answer is, bare or in \\boxed{} alone."""
    if text is None:
        return None
    text = text.strip().strip("$").strip()
    box = last_box(text)
    if box is None:
        return exact_number(text)
    whole = (box.begin, box.end) == (0, len(text))
    return exact_number(normalized(box.content)) if whole and box.content else None
