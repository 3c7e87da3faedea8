"""Quantities: a number of exact value, with the unit, percent sign or name that stands beside it.

A quantity equals another by these rules:

- Values are compared exactly. A decimal of at least six decimals and six significant digits also equals a fraction or
  an irrational number that has no finite decimal form, if it is that number rounded or cut off: 0.333333 is 1/3,
  0.333 is not.
- 50% equals 50 and 1/2, because the sign may be the unit of the question.
- Units are dropped. Two different known units make quantities different: 5 cm is not 5 m. Nothing is converted.
- A subscript is a base, compared if both numbers have one.

Example: quantity(r"x = 5\\text{ cm}") == Quantity(value=Fraction(5), unit="cm")
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tinsmith.rl.scoring.exact import rational
from tinsmith.rl.scoring.structures import collection

_SYMBOLS_OF_UNITS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre",
    "km": "kilometer kilometre", "inch": "in inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound lbs", "oz": "ounce",
    "ml": "mL milliliter millilitre", "l": "L liter litre", "gal": "gallon",
    "ms": "millisecond", "s": "sec second", "min": "minute", "h": "hr hour",
    "day": "", "week": "", "month": "", "year": "yr",
    "N": "newton", "J": "joule", "kJ": "kilojoule", "W": "watt", "kW": "kilowatt", "V": "volt", "A": "ampere",
    "Hz": "hertz", "mph": "", "dollar": "", "cent": "", "degree": "deg", "radian": "rad",
}  # fmt: skip
UNITS = {
    name: symbol
    for symbol, names in _SYMBOLS_OF_UNITS.items()
    for base in (symbol, *names.split())
    for name in (base, f"{base}s")
}
"""Known units by their spellings."""
_ATTACHED = "|".join(sorted((unit for unit in UNITS if len(unit) > 1), key=len, reverse=True))
_EXPONENT = r"(?:\s*\^\s*\{?-?[1-3]\}?)?"
_UNIT_TEXT = re.compile(rf"(?<=[\w)}}])\s*(?:\\text\{{[^{{}}\d]*\}}{_EXPONENT}\s*/?\s*)+$")
_FACTORS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TRAILING = re.compile(
    r"(?P<number>.*?[\d})!])\s*(?:"
    r"(?P<text>\\text\{[^{}\d]*\}(?:[\s/]*\\text\{[^{}\d]*\})*)"
    r"|(?<=[\s})])(?P<word>[A-Za-z]{3,}(?:[ /-]+[A-Za-z]+)*)"
    rf"|(?P<unit>(?:{_ATTACHED}|(?<=\s)[mgslhNJWVA]){_EXPONENT}"
    rf"(?:(?:\s*/\s*|\s*\\cdot\s*|\s)(?:{_ATTACHED}|[mgslh]){_EXPONENT})*)(?![A-Za-z])"
    r")(?:\s*\^\s*\{?-?[1-3]\}?)?(?:\s*(?P<more>\\text\{[^{}\d]*\}))?\s*\.?",
)
_DEGREES = re.compile(r"\s*(?:(?<=\d)'{1,2}$|\^\\circ|\^\{\\circ\})\s*(?:[CFK]|\\text\{\s*[CFK]\s*\})?\s*$")
_PERCENT = re.compile(r"\s*(?:%|\\text\{\s*(?:percent|percentage|pct)\s*\}|(?:percent|percentage|pct))\s*$")
_BASE = re.compile(r"\s*_\s*(?:\{\s*(?:\\text\{)?\s*(\w+)\s*\}?\s*\}|(\d+))\s*$")
_LEADING = re.compile(
    r"(?i)^(?:\\text\{\s*)?\s*(?:(?:the )?(?:final |correct |right )?(?:answer|result|value|total)\s*"
    r"(?:is|:)?\s*:?)?\s*\}?\s*"
)
_SIDES = re.compile(r"(?<![<>!:])=|\\equiv(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|lt|gt|in|sim|to|pm|mp)(?![A-Za-z])")
_HEDGE = re.compile(r"\b(?:or|and|not|more|less|fewer|most|least|than|to|through|maybe|if|but|except)\b")
_DECIMAL = re.compile(r"-?\s*[\d,]*\.(\d+)(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*(-?\d+)\s*\}?|[eE](-?\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """An exact value, and what stands beside it.

    Example: Quantity(value=Fraction(5), unit="cm")
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    """Symbol of a known unit; empty for others and for none."""
    base: str = ""
    """The subscript of a number such as 101_2."""
    precision: Fraction | None = None
    """One unit of the last digit of a decimal; None for other numbers and for decimals of fewer than six digits."""


def quantity(text: str) -> Quantity | None:
    """The quantity that normalized text is; None if it is something else, or more than one number."""
    if collection(text) is not None:
        return None
    text = last_side(text)
    if _RELATION.search(text):
        return None
    text = _LEADING.sub("", text, count=1)
    base = _BASE.search(text)
    if base:
        text = text[: base.start()]
    shorter = _DEGREES.sub("", text)
    unit = "degree" if shorter != text else ""
    text, percent, factor = shorter, False, 1
    if without := _PERCENT.search(text):
        text, percent = text[: without.start()], True
    value = rational(text)
    if value is None:
        read = _without_unit(text)
        if read is None:
            return None
        text, unit, factor, percent = *read, percent
        if without := _PERCENT.search(text):
            text, percent = text[: without.start()], True
        value = rational(text)
    if value is None:
        return None
    return Quantity(
        value=value * factor,
        percent=percent,
        unit=unit,
        base=(base[1] or base[2]) if base else "",
        precision=_precision(text),
    )


def last_side(text: str) -> str:
    """What a chain of equations ends in: 7 for x = 3 + 4 = 7."""
    return _SIDES.split(text)[-1].strip()


def readings(text: str) -> tuple[str, ...]:
    """The expressions that normalized text states: of 1/3 \\approx 0.333, the exact and the approximate value."""
    exact, *approximate = _APPROXIMATELY.split(text)
    stated = (*([exact] if re.search(r"\d|\\", last_side(exact)) else []), *approximate[-1:])
    return tuple(reading.strip() for reading in stated) if approximate else (text,)


def equal(right: Quantity, reply: Quantity) -> bool:
    """Whether two quantities are equal, by the rules of this module."""
    if right.unit and reply.unit and right.unit != reply.unit:
        return False
    if right.base and reply.base and right.base != reply.base:
        return False
    values = [(right.value, reply.value)]
    if right.percent != reply.percent:
        values.append((right.value / 100, reply.value) if right.percent else (right.value, reply.value / 100))
    return any(first == second or _rounded(first, second, right, reply) for first, second in values)


def is_decimal_of(decimal: Quantity, value: Fraction) -> bool:
    """Whether a decimal of enough digits is a value, rounded or cut off."""
    if decimal.precision is None or (decimal.value < 0) != (value < 0):
        return False
    missing = abs(value) - abs(decimal.value)
    return -decimal.precision / 2 <= missing < decimal.precision


def without_unit(text: str) -> str:
    """A normalized expression without the text after it, such as \\text{cm}^2."""
    return text if hedged(text) else _UNIT_TEXT.sub("", text) or text


def hedged(text: str) -> bool:
    """Whether words of normalized text restrict it or offer more: 5 or more, at least 5, not 5."""
    return any(_HEDGE.search(words.casefold()) for words in re.findall(r"\\text\{([^{}]*)\}", text))


def _rounded(first: Fraction, second: Fraction, right: Quantity, reply: Quantity) -> bool:
    """Whether the value of one quantity is the other's, written as a decimal that ends too early."""
    if first != right.value or second != reply.value or (right.precision is None) == (reply.precision is None):
        return False
    exact, decimal = (first, reply) if right.precision is None else (second, right)
    return not _is_finite_decimal(exact) and is_decimal_of(decimal, exact)


def _is_finite_decimal(value: Fraction) -> bool:
    denominator = value.denominator
    return (10 ** denominator.bit_length()) % denominator == 0


def _precision(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text.strip())
    if match is None:
        return None
    digits = text[: match.end(1)].replace(".", "").lstrip("- 0,")
    exponent = match[2] or match[3] or "0"
    if len(match[1]) < 6 or len(digits) < 6 or len(exponent) > 5:
        return None
    return Fraction(10) ** (int(exponent) - len(match[1]))


def _without_unit(text: str) -> tuple[str, str, int] | None:
    """The number, the symbol of a known unit and the factor of a text such as 5 cm or 5 million dollars."""
    match = _TRAILING.fullmatch(text)
    if match is None:
        return None
    unit = match["text"] or match["word"] or match["unit"]
    unit = " ".join(re.sub(r"\\text|[{}]", " ", f"{unit} {match['more'] or ''}").split())
    if _HEDGE.search(unit.casefold()):
        return None
    first, _, rest = unit.partition(" ")
    factor = _FACTORS.get(first.casefold(), 1)
    name = rest if factor > 1 else unit
    return match["number"], UNITS.get(name, UNITS.get(name.casefold(), "")), factor
