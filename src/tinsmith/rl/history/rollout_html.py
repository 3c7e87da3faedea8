"""A rollout as HTML, for the dashboard and the report. All text of it is escaped, and long text is cut.

The result has classes and no styles or scripts; a page includes STYLE once, in a style element or a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from tinsmith.rl.history.transcript import LEVELS, Measure, Transcript, level, transcript

_CHARACTERS, _NAME, _TOKENS = 20_000, 200, 4_000
"""Longest text, longest name and most tokens of a turn in a page."""

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


def rollout_html(record: Mapping[str, Any], measure: Measure | None = None, *, with_task: bool = True) -> Markup:
    """A record of rollouts/ as HTML, its tokens colored by `measure`; without the task, to be shown beside others."""
    rollout = transcript(record)
    page = _template().render(
        rollout=rollout,
        head=_head(rollout),
        measure=measure,
        with_task=with_task,
        limit=_CHARACTERS,
        name_limit=_NAME,
        token_limit=_TOKENS,
        shade=_shade,
    )
    return Markup(page)


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
