"""Numbers with their nouns or units, as people read them: 2 files, 1.5 GB, 3 min."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """The number and the noun, in the plural unless the number is 1. Floats have up to six digits.

    Example: counted(2, "sampling process") == "2 sampling processes"
    """
    digits = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{digits} {noun}" if number == 1 else f"{digits} {_plural(noun)}"


def display_bytes(count: float) -> str:
    """Bytes in a fitting unit, such as 1.5 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def display_seconds(seconds: float, digits: int = 0) -> str:
    """A duration in a fitting unit, such as 3 min; with `digits` after the point, unless it is of seconds."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "tch", "sh")) else f"{noun}s"
