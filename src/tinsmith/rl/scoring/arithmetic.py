"""Evaluation of arithmetic that a policy wrote. The text is parsed by the grammar below and never executed.

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor)*
    factor  = "-"* (number | "(" sum ")" | "\\frac" "{" sum "}" "{" sum "}")
    number  = ASCII digits with at most one decimal point

Other spellings: × · ⋅ \\times \\cdot for *, ÷ \\div for /, − for -, \\left( and \\right), and $…$, \\(…\\) or \\[…\\]
around the whole. Values are exact (`fractions.Fraction`). Everything else has no value: powers, //, names,
underscores, exponents such as 1e5, digits of other scripts. Without powers, a value has about as many digits as its
text, so the limits below bound time and memory.

Example: evaluate("(1 + 2) / 3") == Arithmetic(value=Fraction(1), numbers=(1, 2, 3))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 1000
"""Longer text has no value."""
MAX_NUMBERS = 64
"""An expression with more numbers has no value."""
MAX_DIGITS = 16
"""An expression with a longer number has no value."""
MAX_DEPTH = 32
"""An expression with more nested parentheses has no value."""

_TOKEN = re.compile(
    r"(?P<space>\s+|\\(?:left|right)(?![A-Za-z])|\\[ ,;!])"
    r"|(?P<number>\d+(?:\.\d*)?|\.\d+)"
    r"|(?P<frac>\\[dt]?frac(?![A-Za-z]))"
    r"|(?P<times>[*×·⋅]|\\(?:times|cdot)(?![A-Za-z]))"
    r"|(?P<divide>[/÷]|\\div(?![A-Za-z]))"
    r"|(?P<minus>[-−])"
    r"|(?P<other>[+(){}])",
    re.ASCII,
)
_SYMBOLS = {"times": "*", "divide": "/", "minus": "-", "frac": "frac"}
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The value of an expression, and its numbers from left to right.

    Example: Arithmetic(value=Fraction(3), numbers=(Fraction(6), Fraction(2)))
    """

    value: Fraction
    numbers: tuple[Fraction, ...]


def evaluate(text: str) -> Arithmetic | None:
    """Return value and numbers of an expression; None if it is not one, divides by 0 or exceeds a limit."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return Parser(_tokens(without_delimiters(text.strip()))).parse()
    except (NoValue, ZeroDivisionError):
        return None


class NoValue(Exception):
    """The text is not an expression of the grammar, or exceeds a limit."""


class Parser:
    """Recursive descent over the tokens of an expression."""

    def __init__(self, tokens: Iterator[str | Fraction]) -> None:
        self._tokens = tokens
        self._numbers: list[Fraction] = []
        self._depth = 0
        self._token = next(tokens, None)

    def parse(self) -> Arithmetic:
        """The whole text as a sum. Raises NoValue or ZeroDivisionError."""
        value = self._sum()
        if self._token is not None:
            raise NoValue
        return Arithmetic(value, tuple(self._numbers))

    def _take(self) -> str | Fraction | None:
        token, self._token = self._token, next(self._tokens, None)
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while self._token in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._token in ("*", "/"):
            value = value * self._factor() if self._take() == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        sign = 1
        while self._token == "-":
            self._take()
            sign = -sign
        token = self._take()
        if isinstance(token, Fraction):
            self._numbers.append(token)
            if len(self._numbers) > MAX_NUMBERS:
                raise NoValue
            return sign * token
        if token == "(":
            return sign * self._inside(")")
        if token == "frac":
            return sign * self._braces() / self._braces()
        raise NoValue

    def _braces(self) -> Fraction:
        if self._take() != "{":
            raise NoValue
        return self._inside("}")

    def _inside(self, end: str) -> Fraction:
        """The sum up to the closing token `end`."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoValue
        value = self._sum()
        if self._take() != end:
            raise NoValue
        self._depth -= 1
        return value


def _tokens(text: str) -> Iterator[str | Fraction]:
    """Numbers, and the symbols + - * / ( ) { } and frac. Raises NoValue at any other character."""
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise NoValue
        position = match.end()
        if match.lastgroup == "number":
            if len(match[0]) > MAX_DIGITS:
                raise NoValue
            yield Fraction(match[0].removesuffix("."))
        elif match.lastgroup != "space":
            yield _SYMBOLS.get(match.lastgroup, match[0])


def without_delimiters(text: str) -> str:
    """`text` without the delimiters of LaTeX mathematics around it."""
    for begin, end in _DELIMITERS:
        if text.startswith(begin) and text.endswith(end) and len(text) >= len(begin) + len(end):
            return text[len(begin) : -len(end)]
    return text
