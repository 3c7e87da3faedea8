"""Mathematical equality of the answer that a reply states with the right one.

What can be decided exactly is decided here: equal text, choices, words, quantities, and collections item by item. Other
expressions are compared by the package math-verify, whose tolerance is checked with 200 digits where it finds two
expressions equal.

Dates, times of day (3:30) and numbers joined by hyphens (555-1234, 5-10) are no arithmetic: they equal only the same
numbers. Two texts that may both be times are compared as times; another ratio, such as 1:2, is a quotient.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, cast

import math_verify
import sympy

from tinsmith.rl.scoring.notation import MAX_CHARACTERS, normalized, words
from tinsmith.rl.scoring.quantities import (
    Quantity,
    equal,
    hedged,
    is_decimal_of,
    last_side,
    quantity,
    readings,
    without_unit,
)
from tinsmith.rl.scoring.replies import is_prose, stated, stated_words
from tinsmith.rl.scoring.structures import collection, equal_collections

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole replies, and that it has no time limit
Verdict = Literal["equal", "different", "unreadable"]

_parse = cast(Any, math_verify.parse)
_verify = cast(Any, math_verify.verify)  # its decorator hides the parameters from the type checker
_DIGITS = 200
"""Digits of the numeric check."""
_MAX_DEPTH = 8
"""Nesting of collections."""
_CHOICE = re.compile(r"\(?\s*(?:\\text\{\s*)?([A-J])\s*\}?\s*[).:]?")
_CHOSEN = re.compile(r"\(?\s*(?:\\text\{\s*)?([A-Ja-j])\s*\}?\s*(?:[).:]?|\)\s*\S.*|[.:]\s+\S.*|\\text\{.*)", re.DOTALL)
_NAMED_CHOICE = re.compile(
    r"(?i:\b(?:answer|option|choice)\b(?:\s+(?:is|would be))?\s*:?\s*(?:(?:option|choice)\s*)?)"
    r"\(?\s*(?:\\text\{\s*)?([A-J])\b\s*\}?\)?(?![A-Za-z']|\s*(?:,|or|and)\s*\(?[A-J]\b)"
)
_ASSIGNMENT = re.compile(
    r"(?:\\text\{[^{}]*\}|[A-Za-z](?:_\{?\w+\}?|')?(?:\s*\([a-z]\))?|\\[A-Za-z]+)\s*(?:=)(.*)", re.DOTALL
)
_VARIABLE = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=")
_RELATION = re.compile(r"=|[<>]|\\(?:le|ge|ne|lt|gt|in)(?![A-Za-z])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’ .,-]*")
_DATE = re.compile(r"([12]\d{3})-(0?[1-9]|1[0-2])-(0?[1-9]|[12]\d|3[01])")
_TIME = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)")
_JOINED = re.compile(r"\d+(?:-\d+)+")
_COUNTED = re.compile(r"(\d+(?:\s?-\s?\d+)+)\s+[A-Za-z]+")
_PHONE_NUMBER = re.compile(r"\d+(?:-\d+){2,}|\d{3,}-\d{3,}|0\d+-\d+|\d+-0\d+")
_UNION = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]])\s*U\s*(?=[(\[])")


def compare(answer: str, text: str) -> Verdict:
    """Whether `text` states an expression that equals `answer`; `unreadable` if there is no answer to compare with.

    Without a time limit; `call_with_limit` sets one.
    """
    right = normalized(answer)
    if not right:
        return "unreadable"
    return "equal" if _states(right, text) else "different"


def _states(right: str, text: str) -> bool:
    reply = normalized(text)
    if not reply:
        return False
    if _same_text(right, reply) or (max(len(right), len(reply)) <= MAX_CHARACTERS and _same_words(right, reply)):
        return True
    if choice := _CHOICE.fullmatch(right):
        chosen = _CHOSEN.fullmatch(reply) or next(reversed(list(_NAMED_CHOICE.finditer(reply[-MAX_CHARACTERS:]))), None)
        if chosen:
            return chosen[1].upper() == choice[1]
        if is_prose(reply):
            return False
    if _is_words(right) and _same_words(right, normalized(stated_words(text))):
        return True
    if quantity(reply) is None and (len(reply) > MAX_CHARACTERS or is_prose(reply)):
        expression = stated(text)
        if expression is None:
            return False
        reply = normalized(expression)
    return any(_equal(right, reading) for reading in readings(reply))


def _equal(right: str, reply: str, depth: int = 0) -> bool:
    """Whether two normalized expressions are equal."""
    if not reply or depth > _MAX_DEPTH or max(len(right), len(reply)) > MAX_CHARACTERS:
        return bool(reply) and right == reply
    if _same_text(right, reply):
        return True
    if _is_words(right) or _is_words(reply):
        return _same_words(right, reply)

    def items_equal(first: str, second: str) -> bool:
        return _equal(first, second, depth + 1)

    if (verdict := _equal_labels(right, reply)) is not None:
        return verdict
    names = _variable(right), _variable(reply)
    if all(names) and names[0] != names[1] and collection(right) is None:
        return False
    expected = quantity(right) if _is_value(right) else None
    actual = quantity(reply) if expected is not None or _is_value(reply) else None
    if expected is not None and actual is not None:
        return equal(expected, actual)
    if (verdict := _equal_structures(right, reply, items_equal)) is not None:
        return verdict
    return _equal_expressions(right, reply, expected, actual)


def _equal_structures(right: str, reply: str, items_equal: Callable[[str, str], bool]) -> bool | None:
    """The verdict on collections, unions and assignments; None for other expressions."""
    first, second = collection(right), collection(reply)
    if first is not None and second is not None:
        return equal_collections(first, second, items_equal)
    if (first is not None and first.kind in ("()", "[]", "rows")) or (
        second is not None and second.kind in ("()", "[]")
    ):
        single = reply if second is None else right
        if quantity(single) is not None:
            return False
    if second is not None and second.kind == "" and "\\pm" not in right and not _RELATION.search(right):
        return all(items_equal(right, item) for item in second.items)  # the same answer, repeated
    if _UNION.search(right) and _UNION.search(reply):
        parts = _UNION.split(right), _UNION.split(reply)
        if len(parts[0]) == len(parts[1]) and all(any(items_equal(a, b) for b in parts[1]) for a in parts[0]):
            return True
    names = _ASSIGNMENT.fullmatch(right), _ASSIGNMENT.fullmatch(reply)
    if "=" in right and not names[0] and not _RELATION.search(reply):
        return False  # an equation is not its last side
    values = [last_side(text) if name else text for name, text in zip(names, (right, reply), strict=True)]
    if names[0] and names[1]:
        return items_equal(values[0], values[1])
    if (names[0] and not _RELATION.search(reply)) or (names[1] and not _RELATION.search(right)):
        return items_equal(values[0], values[1])
    return None


def _equal_expressions(right: str, reply: str, expected: Quantity | None, actual: Quantity | None) -> bool:
    """Whether math-verify finds two expressions equal, and they are equal to 200 digits."""
    if hedged(reply) and not hedged(right):
        return False
    right, reply = without_unit(right), without_unit(reply)
    first, second = _parse(f"${right}$", parsing_timeout=None), _parse(f"${reply}$", parsing_timeout=None)
    if not first or not second:
        return False
    if (expected is None) != (actual is None):
        value, decimal = (second[0], expected) if actual is None else (first[0], actual)
        if decimal is not None and decimal.precision is not None and (constant := _constant(value)) is not None:
            return is_decimal_of(decimal, constant)
    same = _verify(first, second, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and not _differ(first[0], second[0])


def _constant(value: Any) -> Fraction | None:
    """The value of a real constant, to 200 digits; None for other expressions."""
    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return None
    number = _exactly(value).evalf(_DIGITS)
    return Fraction(str(number)) if isinstance(number, sympy.Float) and number.is_finite else None


def _differ(first: Any, second: Any) -> bool:
    """Whether two expressions have different values, computed with many digits at a point where both are defined."""
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols and first == second:
        return False
    point = {symbol: sympy.Rational(1009 + 97 * place, 761 + 13 * place) for place, symbol in enumerate(symbols)}
    try:
        values = [_exactly(expression).subs(point).doit().evalf(_DIGITS) for expression in (first, second)]
        size = max(abs(value) for value in values)
        return bool(abs(values[0] - values[1]) > size * sympy.Float(10) ** (20 - _DIGITS))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False  # not a number: infinite, undefined, or of another kind


def _exactly(expression: Any) -> Any:
    """The expression with decimals as fractions."""
    return expression.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))


def _equal_labels(right: str, reply: str) -> bool | None:
    """The verdict on dates, times of day and numbers joined by hyphens, as 555-1234, which are no arithmetic; None for
    other text. A ratio such as 1:2 is a quotient, except beside a second text that may be a time."""
    if (dates := (_date(right), _date(reply))) != (None, None):
        return dates[0] == dates[1]
    times = _TIME.fullmatch(right), _TIME.fullmatch(reply)
    if times[0] and times[1]:
        return list(map(int, times[0].groups())) == list(map(int, times[1].groups()))
    if _JOINED.fullmatch(right) or _PHONE_NUMBER.fullmatch(reply):
        return _same_text(right, _COUNTED.sub(r"\1", without_unit(reply)))
    return None


def _date(text: str) -> tuple[int, ...] | None:
    """Year, month and day of a date, which is no subtraction; None for other text."""
    match = _DATE.fullmatch(text.strip())
    return tuple(map(int, match.groups())) if match else None


def _same_text(right: str, reply: str) -> bool:
    """Whether two expressions differ only in spaces that separate nothing."""
    return right == reply or _without_spaces(right) == _without_spaces(reply)


def _without_spaces(text: str) -> str:
    return re.sub(r"(?<![\w,]) | (?!\w)|(?<=[A-Za-z]) (?=\d)", "", text)


def _same_words(right: str, reply: str) -> bool:
    return _is_words(right) and words(right) == words(reply)


def _is_words(text: str) -> bool:
    """Whether normalized text is words, and not a product of variables."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    if not _WORDS.fullmatch(plain) or re.search(r"(?:^|\s)(?:and|or)(?:\s|$)", plain) or "," in plain:
        return False
    return plain != text.strip() or len(plain) > 2


def _is_value(text: str) -> bool:
    """Whether the last side of an equation is its value: x = 5 and 2 + 3 = 5, but not x + y = 5."""
    sides = re.split(r"(?<![<>!:])=", text)
    first = sides[0].strip()
    return (
        len(sides) == 1
        or (_ASSIGNMENT.fullmatch(text) is not None and quantity(text) is not None)
        or quantity(first) is not None
    )


def _variable(text: str) -> str:
    """The variable that an equation such as x_{1} = 5 gives a value; empty for other expressions."""
    match = _VARIABLE.match(text)
    return re.sub(r"[{}\s]", "", match[1]) if match else ""
