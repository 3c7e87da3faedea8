"""Numbers with their nouns in messages: 1 file, 2 files."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """The number and the noun, in the plural unless the number is 1. Floats have up to six digits.

    Example: counted(2, "sampling process") == "2 sampling processes"
    """
    digits = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{digits} {noun}" if number == 1 else f"{digits} {_plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "tch", "sh")) else f"{noun}s"
