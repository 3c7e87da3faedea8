"""A rollout in the terminal: what was sent, replies with their tokens, rewards; and a group, one beneath the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from tinsmith.rl.history.console_text import cut, line, number, plain
from tinsmith.rl.history.rows import RolloutRow
from tinsmith.rl.history.transcript import LEVELS, Measure, Transcript, TurnRecord, level, transcript

_CHARACTERS, _TOKENS, _TOKEN = 20_000, 4_000, 200
"""Longest text, most tokens of a reply, and longest token; beyond, the text is cut."""
_NEGATIVE = ("", "#5c1a1a", "#7a1f1f", "#992525", "#b82a2a", "#d62f2f")
_POSITIVE = ("", "#143d1f", "#185227", "#1c672f", "#207c37", "#24913f")


def print_rollout(
    row: RolloutRow,
    record: Mapping[str, Any],
    console: Console,
    *,
    measure: Measure | None = None,
    thinking: bool = False,
    with_task: bool = True,
) -> None:
    """Print a rollout whole. `thinking`: unfold it; `with_task`: the messages and the right answer too."""
    rollout = transcript(record)
    console.print(Rule(Text(f"{row.id}  {line(row.task, 60)}", style="bold"), align="left"))
    console.print(_summary(row, rollout), soft_wrap=True)
    if rollout.error:
        console.print(Text("failed: ", style="red").append_text(cut(rollout.error, _CHARACTERS)), soft_wrap=True)
    if with_task:
        _print_task(rollout, console)
    named = len(rollout.trajectories) > 1 or any(each.role != "policy" for each in rollout.trajectories)
    for trajectory in rollout.trajectories:
        if named:
            trained = "" if trajectory.trained else "  not trained on"
            text = f"{line(trajectory.role, 60)}  reward {number(trajectory.reward)}{trained}"
            console.print(Text(text, style="bold magenta"))
        for at, turn in enumerate(trajectory.turns):
            if at and turn.input:
                _print_block(console, f"sent before turn {at + 1}", cut(turn.input, _CHARACTERS))
            _print_reply(console, turn, measure, thinking=thinking)
    for name, value in rollout.metrics.items():
        console.print(Text(f"{line(name, 60)}: {number(value)}", style="dim"))
    if measure:
        console.print(Text(_legend(measure), style="dim"), soft_wrap=True)


def print_group(
    rows: Sequence[RolloutRow],
    records: Sequence[Mapping[str, Any]],
    console: Console,
    *,
    measure: Measure | None = None,
    thinking: bool = False,
) -> None:
    """Print the rollouts of a group, the task once."""
    for at, (row, record) in enumerate(zip(rows, records, strict=True)):
        print_rollout(row, record, console, measure=measure, thinking=thinking, with_task=at == 0)


def _print_task(rollout: Transcript, console: Console) -> None:
    for role, content in rollout.messages:
        _print_block(console, role, cut(content, _CHARACTERS))
    if rollout.answer:
        _print_block(console, "right answer", cut(rollout.answer, _CHARACTERS))


def _summary(row: RolloutRow, rollout: Transcript) -> Text:
    parts = [f"reward {number(rollout.reward)}"]
    parts += [f"{line(name, 40)} {number(value)}" for name, value in rollout.reward_parts.items()]
    if row.advantage is not None:
        parts.append(f"advantage {number(row.advantage)}")
    if rollout.correct is not None:
        parts.append("right" if rollout.correct else "wrong")
    if rollout.termination not in ("done", "error", ""):
        parts.append(f"ended by {line(rollout.termination, 40)}")
    return Text(
        "  ".join([*parts, f"version {rollout.version}", f"group {row.group}, number {row.index}"]), style="cyan"
    )


def _print_reply(console: Console, turn: TurnRecord, measure: Measure | None, *, thinking: bool) -> None:
    by = f" by {line(turn.model, 60)}" if turn.model else ""
    cut_off = ", cut off at the limit" if turn.stop == "length" else ""
    reward = f", reward {number(turn.reward)}" if turn.reward is not None else ""
    head = f"reply{by} ({len(turn.tokens):,} tokens{cut_off}{reward})"
    if measure and turn.tokens:
        _print_block(console, head, _colored(turn, measure, has_colors=console.color_system is not None), style="green")
        return
    text = Text()
    for piece in turn.pieces:
        if text:
            text.append("\n")
        if piece.kind == "thinking" and not thinking:
            text.append(f"[thinking, {len(piece.text):,} characters: --thinking shows them]", style="dim")
            continue
        if piece.kind != "text":
            text.append(f"[{piece.kind.replace('_', ' ')}] ", style="yellow")
        text.append_text(cut(piece.text, _CHARACTERS))
    _print_block(console, head, text or Text("(nothing)", style="dim"), style="green")


def _print_block(console: Console, head: str, text: Text, style: str = "blue") -> None:
    console.print(Text(plain(head), style=f"bold {style}"))
    console.print(Padding(text, (0, 0, 0, 2)))


def _colored(turn: TurnRecord, measure: Measure, *, has_colors: bool) -> Text:
    """The tokens with a background by their values, where colors are shown; else with the values after them."""
    text, largest = Text(), turn.largest(measure)
    for token in turn.tokens[:_TOKENS]:
        value = token.value(measure)
        shade = level(value, largest)
        color = (_NEGATIVE if shade < 0 else _POSITIVE)[min(abs(shade), LEVELS)]
        text.append(plain(token.text[:_TOKEN]), style=f"on {color}" if color else "")
        if color and not has_colors:
            text.append(f"⟨{number(value)}⟩")
    if len(turn.tokens) > _TOKENS:
        text.append(f" … {len(turn.tokens) - _TOKENS:,} more tokens", style="dim")
    return text


def _legend(measure: Measure) -> str:
    if measure == "logprob":
        return "red: unlikely tokens, at -6 nats the full color"
    if measure == "advantage":
        return "green: tokens made more likely; red: less likely; no color: no advantage"
    return "green: the trainer finds the token likelier than the sampler did; red: less likely; full color at 0.5 nats"
