"""Exact values of numbers and arithmetic as mathematics writes them, beyond the grammar of the game Countdown.

    sum      = product (("+" | "-") product)*
    product  = signed (("*" | "/")? signed)*          without an operator before "(", "{" and commands: multiplication
    signed   = ("-" | "+")* power
    power    = postfix ("^" signed)?
    postfix  = atom "!"*
    atom     = number | mixed number | "(" sum ")" | "{" sum "}" | \\frac{a}{b} | \\sqrt[n]{a} | \\binom{n}{k}
    number   = digits, thousands with commas or spaces, a decimal point, an exponent as in 1.5e3, \\overline{3} for
               repeated decimals

Values are fractions of at most MAX_BITS bits. What has no rational value, or a larger one, has none here.

Example: rational(r"2\\frac{2}{3}") == Fraction(8, 3); rational(r"\\sqrt{2}") is None
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction

from typing_extensions import override

from tinsmith.rl.scoring.arithmetic import NoValue, Parser

MAX_BITS = 20_000
"""A value with a larger numerator or denominator is not computed."""
MAX_DIGITS = 4_000
"""Longer numbers are not read."""
_MAX_EXPONENT = 9_999
"""Largest exponent of ten of a number."""

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<repeated>(?P<head>\d*\.\d*)\\(?:overline|bar|dot)\s*\{?(?P<cycle>\d{1,50})\}?)"
    r"|(?P<number>(?:[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|(?<![\d ])[1-9]\d{0,2}(?: \d{3})+(?!\d| ?/)|\d+)(?:\.\d*)?"
    r"(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
    r"|(?P<command>\\(?:frac|sqrt|binom))(?![A-Za-z])"
    r"|(?P<times>\*(?!\*)|\\(?:times|cdot)(?![A-Za-z]))"
    r"|(?P<divide>/|\\div(?![A-Za-z]))"
    r"|(?P<power>\^|\*\*)"
    r"|(?P<other>[-+(){}\[\]!])",
    re.ASCII,
)
_SYMBOLS = {"times": "*", "divide": "/", "power": "^"}


class _Mixed(Fraction):
    """An integer literal, which a fraction may follow as in 2 2/3."""


def rational(text: str) -> Fraction | None:
    """The value of normalized arithmetic; None if it has no rational value, or a larger one than is computed."""
    try:
        return _ExactParser(_tokens(text)).parse().value
    except (NoValue, ZeroDivisionError, RecursionError):
        return None


class _ExactParser(Parser):
    """The larger grammar, over the same tokens and more."""

    @override
    def _sum(self) -> Fraction:
        value = self._product()
        while self._token in ("+", "-"):
            value = _bounded(value + self._product() if self._take() == "+" else value - self._product())
        return value

    @override
    def _product(self) -> Fraction:
        value = self._factor()
        while True:
            if self._token == "*":
                self._take()
                value = value * self._factor()
            elif self._token == "/":
                self._take()
                value = value / self._factor()
            elif self._token in ("(", "{", "\\frac", "\\sqrt", "\\binom"):
                value = value * self._factor()
            else:
                return _bounded(value)
            value = _bounded(value)

    @override
    def _factor(self) -> Fraction:
        sign = 1
        while self._token in ("-", "+"):
            sign = -sign if self._take() == "-" else sign
        self._depth += 1
        if self._depth > 64:  # signs in exponents nest without parentheses
            raise NoValue
        value = self._postfix()
        if self._token == "^":
            self._take()
            value = _power(value, self._factor())
        self._depth -= 1
        return sign * value

    def _postfix(self) -> Fraction:
        value = self._atom()
        while self._token == "!":
            self._take()
            if value.denominator != 1 or not 0 <= value <= 1_000:
                raise NoValue
            value = Fraction(math.factorial(int(value)))
        return value

    def _atom(self) -> Fraction:
        token = self._take()
        if isinstance(token, Fraction):
            return self._mixed(token) if isinstance(token, _Mixed) else token
        if token in ("(", "{"):
            return self._inside(")" if token == "(" else "}")
        if token == "\\frac":
            return self._braces() / self._braces()
        if token == "\\sqrt":
            return self._root()
        if token == "\\binom":
            above, below = self._braces(), self._braces()
            if above.denominator != 1 or below.denominator != 1 or not 0 <= below <= above <= 1_000:
                raise NoValue
            return Fraction(math.comb(int(above), int(below)))
        raise NoValue

    def _root(self) -> Fraction:
        degree = Fraction(2)
        if self._token == "[":
            self._take()
            degree = self._inside("]")
        return _power(self._braces(), 1 / degree)

    def _mixed(self, whole: Fraction) -> Fraction:
        """An integer, with the proper fraction after it if there is one: 2 2/3, 2\\frac{2}{3}."""
        if self._token == "\\frac":
            self._take()
            above, below = self._braces(), self._braces()
            proper = above.denominator == below.denominator == 1 and 0 < above < below
            return whole + above / below if proper else whole * above / below
        if isinstance(self._token, _Mixed):
            above = Fraction(self._token)
            self._take()
            if self._token != "/":
                raise NoValue
            self._take()
            below = self._take()
            if not isinstance(below, _Mixed) or not 0 < above < below:
                raise NoValue
            return whole + above / below
        return Fraction(whole)


def _tokens(text: str) -> Iterator[str | Fraction]:
    """The tokens of the grammar. Raises NoValue at any other character."""
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NoValue
        position = match.end()
        kind = match.lastgroup
        if match["repeated"]:
            yield _repeating(match["head"], match["cycle"])
        elif kind == "number":
            yield _number(match[0])
        elif kind != "space":
            yield _SYMBOLS.get(kind or "", match[0])


def _number(text: str) -> Fraction:
    digits, _, exponent = text.replace(",", "").replace(" ", "").lower().partition("e")
    if len(digits) > MAX_DIGITS or len(exponent.lstrip("+-0")) > len(str(_MAX_EXPONENT)):
        raise NoValue
    value = Fraction(digits.removesuffix("."))
    if exponent:
        return value * Fraction(10) ** int(exponent)
    return _Mixed(value) if digits.isdecimal() else value


def _repeating(head: str, cycle: str) -> Fraction:
    """The value of a decimal such as 0.1666…, from the text before the cycle and the cycle."""
    whole, _, decimals = head.partition(".")
    shift = 10 ** len(decimals)
    return Fraction(int(whole + decimals or "0"), shift) + Fraction(int(cycle), shift * (10 ** len(cycle) - 1))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent. Raises NoValue if it is not rational or too large."""
    if exponent.denominator != 1:
        if exponent.denominator > 64 or base < 0:
            raise NoValue
        degree = exponent.denominator
        base, exponent = (
            Fraction(_exact_root(base.numerator, degree), _exact_root(base.denominator, degree)),
            Fraction(exponent.numerator),
        )
    if abs(base) not in (0, 1) and _bits(base) * abs(exponent) > MAX_BITS:
        raise NoValue
    if base == 0 and exponent == 0:
        raise NoValue
    return base ** (int(exponent) if abs(base) != 1 else int(exponent) % 2)


def _exact_root(number: int, degree: int) -> int:
    if degree == 2:
        root = math.isqrt(number)
    elif number.bit_length() > 1_000:
        raise NoValue
    else:
        root = round(number ** (1 / degree)) if number.bit_length() < 100 else 0
    if root**degree != number:
        raise NoValue
    return root


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > 2 * MAX_BITS:
        raise NoValue
    return value
