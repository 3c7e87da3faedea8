"""Mathematical equality, by the package math-verify."""

from __future__ import annotations

import logging
from typing import Any, Literal, cast

import math_verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole replies, and that it has no time limit
Verdict = Literal["equal", "different", "unreadable"]

_parse = cast(Any, math_verify.parse)
_verify = cast(Any, math_verify.verify)  # its decorator hides the parameters from the type checker


def compare(answer: str, text: str) -> Verdict:
    """Whether math-verify finds an expression in `text` that equals `answer`; `unreadable` if it cannot read `answer`.

    Without a time limit; `call_with_limit` sets one.
    """
    right = _parse(f"${answer}$", parsing_timeout=None) or _parse(answer, parsing_timeout=None)
    if not right:
        return "unreadable"
    return "equal" if _verify(right, _parse(text, parsing_timeout=None), timeout_seconds=None) else "different"
