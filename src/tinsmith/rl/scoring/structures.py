"""Collections of mathematics: tuples, intervals, sets, lists and matrices, split into their items.

    (1, 2)   tuple or open interval: ordered        \\{1, 2\\}              set: in any order
    [1, 2]   closed interval or list: ordered       1, 2 or 1 and 2       list without brackets: in any order
    (1, 2]   half-open interval: ordered            \\begin{pmatrix} …     matrix: by rows

Collections of different brackets are different. A set equals the same list without brackets, and a tuple the
list in its order.

Example: collection("(1, x+2]") == Collection(kind="(]", items=("1", "x+2"))
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_ITEMS = 64
"""Items of larger collections are not compared one by one."""
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(
    r"\\[{}\\]|\\(?:begin|end)\s*\{\w+\*?\}|[()\[\]{},;]|\\text\{ *(?:and|or) *\}|(?<=[\s)}\]])(?:and|or)(?=[\s(\\{\[])"
)
_THOUSANDS = re.compile(r"\d{3}(?![\d,]*\d)|\d{3}(?=,\d{3})")
_MATRIX = re.compile(r"\\begin\s*\{[pbB]?matrix\}(.*)\\end\s*\{[pbB]?matrix\}", re.DOTALL)
_NAME = re.compile(r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\in(?![A-Za-z]))\s*")


@dataclass(frozen=True, slots=True)
class Collection:
    """The items between a pair of brackets.

    Example: Collection(kind="{}", items=("1", "2"))
    """

    kind: str
    """The brackets; empty without any, `rows` and `row` in matrices."""
    items: tuple[str, ...]


def collection(text: str) -> Collection | None:
    """The collection that normalized text is; None if it is something else, such as one number in parentheses."""
    text = text.strip()
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\(?:\[\w+\])?", matrix[1]) if row.strip()]
        return Collection("rows", tuple(rows)) if len(rows) > 1 else _row(rows[0] if rows else "")
    if re.match(r"\s*[A-Za-z]\w{0,2}\s*(?:=|\\in)", text) and _NAME.sub("", text, count=1)[:2].startswith(
        ("(", "[", "\\{")
    ):
        text = _NAME.sub("", text, count=1)
    if re.search(r"(?<!\\)&", text):
        return _row(text)
    pieces = _pieces(text)
    if pieces is None:
        return None
    kind = _brackets(text)
    if kind is None:
        return Collection("", pieces) if 1 < len(pieces) <= MAX_ITEMS else None
    inner = text[len(kind[0]) : -len(kind[1])] if kind[0] else text
    pieces = _pieces(inner, thousands=False)
    if pieces is None or len(pieces) > MAX_ITEMS:
        return None
    brackets = kind[0] + kind[1]
    if brackets == "\\{\\}":
        return Collection("{}", () if pieces == ("",) else pieces)
    return Collection(brackets, pieces) if len(pieces) > 1 else None


def equal_collections(right: Collection, reply: Collection, equal: Callable[[str, str], bool]) -> bool:
    """Whether two collections are equal, given the equality of items."""
    if right.kind == reply.kind and right.kind not in ("", "{}"):
        return _in_order(right.items, reply.items, equal)
    kinds = {right.kind, reply.kind}
    if kinds <= {"", "{}"}:
        return _in_any_order(right.items, reply.items, equal)
    return kinds == {"", "()"} and _in_order(right.items, reply.items, equal)


def distinct(items: tuple[str, ...], equal: Callable[[str, str], bool]) -> list[str]:
    """The items without repetitions."""
    unique: list[str] = []
    for item in items:
        if not any(equal(item, other) for other in unique):
            unique.append(item)
    return unique


def _in_order(right: tuple[str, ...], reply: tuple[str, ...], equal: Callable[[str, str], bool]) -> bool:
    return len(right) == len(reply) and all(equal(*pair) for pair in zip(right, reply, strict=True))


def _in_any_order(right: tuple[str, ...], reply: tuple[str, ...], equal: Callable[[str, str], bool]) -> bool:
    expected, actual = distinct(right, equal), distinct(reply, equal)
    if len(expected) != len(actual):
        return False
    return all(any(equal(item, other) for other in actual) for item in expected)


def _row(text: str) -> Collection:
    return Collection("row", tuple(text.split("&")))


def _brackets(text: str) -> tuple[str, str] | None:
    """The pair of brackets around the whole text."""
    for begin in ("\\{", "(", "["):
        if text.startswith(begin):
            for end in ("\\}", ")", "]"):
                if text.endswith(end) and (begin == "\\{") == (end == "\\}") and _closes_at_end(text):
                    return begin, end
    return None


def _closes_at_end(text: str) -> bool:
    """Whether the first bracket of the text is closed by its last."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += _change(match[0])
        if depth == 0:
            return match.end() == len(text)
    return False


def _change(token: str) -> int:
    if token.startswith("\\begin") or token[-1] in _OPEN:
        return 1
    return -1 if token.startswith("\\end") or (token[-1] in _CLOSE and not token.startswith("\\text")) else 0


def _pieces(text: str, *, thousands: bool = True) -> tuple[str, ...] | None:
    """The text between commas, semicolons, `and` and `or` outside of brackets; None if brackets do not match.

    With `thousands`, a comma between digits may belong to a number.
    """
    pieces, depth, begin = [], 0, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        separates = token in (",", ";", "\\\\") or token.endswith(("and", "or")) or token.startswith("\\text")
        if not separates:
            depth += _change(token)
            if depth < 0:
                return None
        elif depth == 0 and not (thousands and token == "," and _within_number(text, match.start())):
            pieces.append(text[begin : match.start()].strip())
            begin = match.end()
    if depth:
        return None
    pieces.append(text[begin:].strip())
    return tuple(piece for piece in pieces if piece) if len(pieces) > 1 else tuple(pieces)


def _within_number(text: str, comma: int) -> bool:
    before = re.search(r"(?:^|[^\d,])([1-9]\d{0,2})(?:,\d{3})*$", text[:comma])
    return before is not None and _THOUSANDS.match(text, comma + 1) is not None
