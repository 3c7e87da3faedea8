"""Text of models for a terminal: characters that would move its cursor, color it or turn its text are made visible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from tinsmith.chat.strict_json import encodable

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = {number: 0x2400 + number for number in range(32) if chr(number) not in "\n\t"}
_SHOWN |= dict.fromkeys(
    [127, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F], 0xFFFD
)


def plain(text: str) -> str:
    """The text without control characters."""
    return encodable(text.translate(_SHOWN))


def line(text: str, limit: int) -> str:
    """The text in one line of at most `limit` characters."""
    joined = " ".join(plain(text[: 4 * limit + 64]).split())
    return joined if len(joined) <= limit else f"{joined[: max(1, limit - 1)]}…"


def cut(text: str, limit: int) -> Text:
    """The text, and how much of it is left out beyond `limit` characters."""
    shown = Text(plain(text[:limit]))
    if len(text) > limit:
        shown.append(f" … {len(text) - limit:,} more characters", style="dim")
    return shown


def number(value: float | None) -> str:
    """The value with four digits, or a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, means of neighbors if there are more than `width`; values that are not finite are gaps."""
    if not values or width < 1:
        return ""
    size = max(1.0, len(values) / width)
    means = []
    for at in range(min(width, len(values))):
        window = [
            each
            for each in values[int(at * size) : max(int(at * size) + 1, int((at + 1) * size))]
            if math.isfinite(each)
        ]
        means.append(sum(window) / len(window) if window else math.nan)
    finite = [each for each in means if math.isfinite(each)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((each - low) * scale)] if math.isfinite(each) else " " for each in means)
