"""The evaluator agrees with Python where Python is safe, and ends at once where Python does not."""

from __future__ import annotations

import ast
import operator
import random
import re
import time
from collections.abc import Callable
from fractions import Fraction

import pytest

from tinsmith.rl.scoring.arithmetic import MAX_CHARACTERS, MAX_DEPTH, MAX_NUMBERS, evaluate
from tinsmith.rl.scoring.replies import last_tagged

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SPELLINGS = {"+": "+", "-": "-", "*": "*", "/": "/"}
OTHER_SPELLINGS = {"+": "+", "-": "−", "*": r"\times ", "/": "÷"}


def by_python(text: str) -> tuple[Fraction, list[Fraction]] | None:
    """Value and numbers by Python's own parser, from left to right; None if the text is not arithmetic."""
    numbers: list[Fraction] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()):
                numbers.append(Fraction(str(ast.get_source_segment(text, node)).removesuffix(".")))
                return numbers[-1]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError

    try:
        return value(ast.parse(text, mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def random_expression(generator: random.Random, depth: int, spellings: dict[str, str]) -> str:
    if depth == 0 or generator.random() < 0.2:
        return generator.choice(("{}", "-{}", "{}.5", ".{}")).format(generator.randint(0, 100) or 7)
    sides = [random_expression(generator, depth - 1, spellings) for _ in range(2)]
    symbol = spellings[generator.choice("+-*/")]
    return generator.choice(("{}{}{}", "({} {} {})", "-({}{} {})")).format(sides[0], symbol, sides[1])


def test_expressions_equal_python():
    generator, without_value = random.Random(1), 0
    for number in range(20_000):
        text = random_expression(generator, number % 3, SPELLINGS)
        expected, result = by_python(text), evaluate(text)
        without_value += expected is None
        assert (result and (result.value, list(result.numbers))) == expected, text
    assert 0 < without_value < 4_000  # divisions by 0


def test_any_text_of_arithmetic_characters_equals_python():
    generator, valid = random.Random(2), 0
    for number in range(60_000):
        text = "".join(generator.choice("0123456789+-*/()+-. ") for _ in range(1 + number % 7)).strip()
        # Differences on purpose: a leading zero has a value; a leading plus has none.
        if not text or re.search(r"(?<![\d.])0\d|(^|[-+*/( ])\+|\.\.", text.replace(" ", "")):
            continue
        expected, result = by_python(text), evaluate(text)
        valid += expected is not None
        assert (result and (result.value, list(result.numbers))) == expected, text
    assert valid > 5_000


def test_other_spellings_have_the_same_value():
    plain, other = random.Random(3), random.Random(3)
    for _ in range(500):
        expected = evaluate(random_expression(plain, 3, SPELLINGS))
        assert evaluate(random_expression(other, 3, OTHER_SPELLINGS)) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{1}{3} \cdot 6", 2),
        (r"\dfrac{(1+2)}{3 - 1}", Fraction(3, 2)),
        (r"-\frac{4}{\frac{1}{2}}", -8),
        (r"$\left( 1 + 2 \right) \div 3$", 1),
        (r"\( 2\times3 \)", 6),
        (r"\[ 2 · 3 ⋅ 4 \]", 24),
        ("44 + 19\n+ 35.", 98),
        ("--5 - -3", 8),
        ("1/3*3", 1),
        ("007", 7),
    ],
)
def test_value_of_latex_and_unusual_forms(text, value):
    result = evaluate(text)
    assert result is not None
    assert result.value == value


HOSTILE = {
    "power": "2**3",
    "nested powers": "9**9**9**9**9",
    "caret": "2^3",
    "floor division": "7//2",
    "names": "__import__('os').system('true')",
    "name": "x + 1",
    "underscore": "1_0 + 2",
    "exponent": "1e5",
    "huge exponent": "1e999999999",
    "complex": "2j",
    "hexadecimal": "0x10",
    "arabic digits": "٣ + ٤",
    "full-width digits": "３＋４",
    "superscript": "2²",
    "fraction sign": "½",
    "comma": "1,000",
    "call": "2(3 + 4)",
    "adjacent numbers": "1 2",
    "unary plus": "+3",
    "division by 0": "1 / (2 - 2)",
    "empty": "",
    "spaces": " " * MAX_CHARACTERS,
    "open": "(1 + 2",
    "closed": "1 + 2)",
    "mixed brackets": "(1 + 2}",
    "half a fraction": r"\frac{1}",
    "other command": r"\timesheet 3",
    "deep": "(" * 400 + "1" + ")" * 400,
    "deeper": "(" * 100_000 + "1" + ")" * 100_000,
    "just too deep": "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1),
    "too many numbers": "+".join(["1"] * (MAX_NUMBERS + 1)),
    "huge number": "9" * 900 + "*" + "9" * 90,
    "minuses": "-" * 999,
    "megabyte": "1+" * 500_000 + "1",
    "megabyte of digits": "9" * 1_000_000,
    "zero bytes": "\0" * 10,
    "surrogate": "\ud800",
}


def least_seconds(work: Callable[[], object]) -> float:
    """CPU time of `work`: the least of five calls, since the garbage collector runs in some of them."""
    seconds = []
    for _ in range(5):
        begin = time.thread_time()
        work()
        seconds.append(time.thread_time() - begin)
    return min(seconds)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_has_no_value_and_ends_at_once(text):
    assert evaluate(text) is None
    assert least_seconds(lambda: evaluate(text)) < 0.01


def test_largest_values_take_milliseconds():
    denominators = [10**15 + 2 * number + 1 for number in range(MAX_NUMBERS // 2)]
    text = "+".join(f"1/{denominator}" for denominator in denominators)
    assert len(text) < MAX_CHARACTERS
    deep = "(" * MAX_DEPTH + "-" * 100 + "1" + ")" * MAX_DEPTH
    assert evaluate(text) is not None
    assert evaluate(deep) is not None
    assert least_seconds(lambda: (evaluate(text), evaluate(deep))) < 0.01


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>1</answer> <answer> 2\n</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1</answer></answer><answer>", "1"),
        ("</answer>1<answer>", None),
        ("<ANSWER>1</Answer>", None),
        ("", None),
    ],
)
def test_last_complete_tag_is_read(text, content):
    assert last_tagged(text, "answer") == content


def test_tags_of_a_long_reply_are_read_in_linear_time():
    assert last_tagged("<answer>" * 100_000, "answer") is None
    assert last_tagged("<ANSWER>1</answer>", "answer", ignore_case=True) == "1"
    assert least_seconds(lambda: last_tagged("<answer>" * 100_000, "answer")) < 0.5
