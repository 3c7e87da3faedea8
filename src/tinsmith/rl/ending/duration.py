"""Lengths of time in settings: a number of seconds, or text such as 5h50m."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_TEXT = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def seconds_of(value: Any) -> Any:
    """Seconds of text such as 90s, 45m or 5h50m; every other value unchanged. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace(" ", "")
    if text.replace(".", "", 1).isdigit():
        return float(text)
    if not _TEXT.fullmatch(text):
        raise ValueError(f"'{value}' is not a length of time; write seconds, or days, hours and minutes as in 5h50m")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


Duration = Annotated[float, BeforeValidator(seconds_of), Field(gt=0)]
"""A length of time in seconds."""
