"""A rollout as HTML, for the dashboard and the report. All text of it is escaped, and long text is cut.

The result has classes and no styles or scripts; a page includes STYLE once, in a style element or a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import jinja2
from markupsafe import Markup

from tinsmith.rl.history.transcript import LEVELS, Measure, TokenRecord, Transcript, level, transcript

_T = TypeVar("_T")

_CHARACTERS, _NAME, _TOKENS, _ITEMS = 20_000, 200, 4_000, 200
"""Longest text, longest name, most tokens of a turn, and most turns, messages or pieces of one list."""
PAGE = 200_000
"""Characters of a rollout that a page shows, if it does not say how many."""
_TOKEN = 20
"""Characters that a colored token counts as: it has a title with its numbers."""

STYLE = """
.ro { font-size: 14px; min-width: 0; overflow-wrap: anywhere; }
.ro-head { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 4px 0; font-variant-numeric: tabular-nums; }
.ro-head b { font-weight: 400; opacity: .65; }
.ro-text { white-space: pre-wrap; unicode-bidi: isolate; }
.ro-role { font-weight: 600; }
.ro-note, .ro summary { opacity: .65; font-size: 12.5px; }
.ro summary { cursor: pointer; }
.ro-message, .ro-input, .ro-trajectory { margin: 8px 0; }
.ro-reply { margin: 8px 0; padding-left: 10px; border-left: 3px solid rgba(37, 99, 235, .6); }
.ro-thinking, .ro-tool_call, .ro-tool_response { margin: 4px 0; padding-left: 8px; border-left: 2px dashed #888; }
.ro-tool_call .ro-text, .ro-tool_response .ro-text { font-family: ui-monospace, monospace; font-size: 13px; }
.ro-error { color: #d92d20; white-space: pre-wrap; }
.ro-group { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 14px; }
""" + "".join(
    f".ro-t{sign}{number} {{ background: rgba({color}, {number * 0.13:.2f}); }}\n"
    for sign, color in (("n", "217, 45, 32"), ("p", "23, 150, 90"))
    for number in range(1, LEVELS + 1)
)


def rollout_html(
    record: Mapping[str, Any],
    measure: Measure | None = None,
    *,
    with_task: bool = True,
    with_head: bool = True,
    characters: int | None = PAGE,
    rest: str = "",
) -> Markup:
    """A record of rollouts/ as HTML, its tokens colored by `measure`; without the task, to be shown beside others.

    The head is a line with the reward. Not more than `characters` of text are shown, and not more than a part of each
    long text; None shows all. `rest` is the address of a page with all of it, to which the notes of what was left out
    link.
    """
    rollout = transcript(record)
    cut = _Cut(characters)
    page = _template().render(
        rollout=rollout,
        head=_head(rollout) if with_head else (),
        measure=measure,
        with_task=with_task,
        cut=cut,
        rest=rest,
        name_limit=_NAME,
        shade=_shade,
    )
    return Markup(page)


class _Cut:
    """Cuts the texts and lists of a page, so that all of them together stay within a number of characters."""

    def __init__(self, characters: int | None) -> None:
        self._left = characters

    def text(self, content: str) -> str:
        """The begin of a text that is shown."""
        if self._left is None:
            return content
        shown = content[: min(_CHARACTERS, self._left)]
        self._left -= len(shown)
        return shown

    def items(self, values: Sequence[_T]) -> Sequence[_T]:
        """The first of some values."""
        return values if self._left is None else values[:_ITEMS]

    def tokens(self, values: Sequence[TokenRecord]) -> Sequence[TokenRecord]:
        """The first of some tokens."""
        if self._left is None:
            return values
        shown = values[: min(_TOKENS, self._left // _TOKEN)]
        self._left -= _TOKEN * len(shown)
        return shown


def _head(rollout: Transcript) -> list[tuple[str, str]]:
    head = [("reward", "–" if rollout.reward is None else f"{rollout.reward:.4g}"), ("version", str(rollout.version))]
    if rollout.correct is not None:
        head.append(("answer", "right" if rollout.correct else "wrong"))
    if rollout.termination not in ("done", "error", ""):
        head.append(("ended by", rollout.termination))
    return head


def _shade(value: float | None, largest: float) -> str:
    """The class of a token: n1 to n5 below zero, p1 to p5 above."""
    number = level(value, largest)
    return f"{'n' if number < 0 else 'p'}{abs(number)}" if number else ""


@cache
def _template() -> jinja2.Template:
    source = files("tinsmith.rl.history").joinpath("rollout.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
