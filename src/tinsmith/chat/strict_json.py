"""JSON as RFC 8259 has it, read and written: Python takes more, which then fails in templates and in other programs."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Levels of objects and lists."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises JSONDecodeError for text that is not JSON.

    Raises ValueError, with the reason, for bytes that are not UTF-8, numbers that are not finite, half of a surrogate
    pair, and over MAX_DEPTH levels.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise _too_deep() from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE.search(text):
        json_text(value)
    return value


def json_text(value: Any) -> str:
    """JSON text of a value. Raises ValueError, with the reason, for what `parse_json` does not read."""
    _check_depth(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    check_text(text)
    return text


def check_text(text: str) -> None:
    """Raise ValueError for text that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(f"it holds \\u{half:04x}, which is half a surrogate pair") from None


def encode_json(value: Any, *, compact: bool = True) -> str:
    """JSON text that can be encoded: half of a surrogate pair becomes a replacement character. Compact text has no
    spaces; the other is for files that people read."""
    separators = (",", ":") if compact else None
    return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators))


def encodable(text: str) -> str:
    """The text with a replacement character for each half of a surrogate pair."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        parts = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in parts if isinstance(part, dict | list)]
    if level:
        raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested over {MAX_DEPTH} levels deep")
