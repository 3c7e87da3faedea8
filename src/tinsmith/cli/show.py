"""The command `tinsmith show`: a run, lists of its rollouts, and single ones, from the files of its folder."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from tinsmith.rl.history import RolloutRow, RunHistory

Flag = Annotated[bool, Parameter(negative="")]
_LIMIT, _INSPECT_LIMIT = 20, 1_000


def show(
    run: Path | None = None,
    rollout: str = "",
    /,
    *,
    step: str = "",
    task: str = "",
    reward: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    role: str = "",
    environment: str = "",
    search: str = "",
    failed: Flag = False,
    cut: Flag = False,
    right: Flag = False,
    wrong: Flag = False,
    eval_: Annotated[bool, Parameter(name="--eval", negative="")] = False,
    sort: Literal["step", "reward", "tokens", "turns", "advantage", "task"] = "step",
    reverse: Flag = False,
    limit: int = 0,
    group: Flag = False,
    tokens: Literal["", "logprob", "advantage", "difference"] = "",
    thinking: Flag = False,
    part: str = "",
    inspect: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show a run: how it stands, its curves and findings; with a condition, its rollouts; with an ID, one of them.

    Parameters
    ----------
    run
        Folder of the run. Default: the most recent one under runs/.
    rollout
        ID of a rollout to show whole, as lists have it, such as train-12-3.
    step
        List rollouts of this step, or of steps such as 10..20 or 10.. .
    task
        List rollouts of tasks whose name contains this text.
    reward
        List rollouts with a reward in this range: MIN..MAX, MIN.. or ..MAX.
    role
        List rollouts in which this role took part.
    environment
        List rollouts of this environment.
    search
        List rollouts whose messages, replies or errors contain this text, ignoring case.
    failed
        List failed rollouts.
    cut
        List rollouts that reached the limit of tokens.
    right
        List rollouts that are right.
    wrong
        List rollouts that are wrong.
    eval_
        List rollouts of evaluations, in place of those of training.
    sort
        Order of the list. By step: the newest first; else the smallest values first.
    reverse
        Reverse the order.
    limit
        Largest number of rollouts in the list. Default: 20, or 1,000 with --inspect.
    group
        With an ID: show all rollouts of its group.
    tokens
        With an ID: color tokens by logprob, advantage, or the difference of trainer and sampler.
    thinking
        With an ID: show what the model thought before its replies.
    part
        Show what another process of the run has recorded: bench, explore or explore-NAME.
    inspect
        Write the rollouts of the list to this .eval file, for `inspect view`.
    json_
        Print JSON.
    """
    from tinsmith.cli.log import latest_run
    from tinsmith.rl.history import RolloutFilter, RunHistory

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding
    history = RunHistory.open(run or latest_run(Path("runs")))
    if part:
        history = _part(history, part)
    if rollout:
        _show_one(history, rollout, group=group, tokens=tokens, thinking=thinking, as_json=json_)
        return
    correct = None if right == wrong else right
    selection = RolloutFilter(
        kind="eval" if eval_ else "train",
        steps=_steps(step),
        task=task,
        reward=_range("--reward", reward),
        role=role,
        environment=environment,
        search=search,
        failed=failed or None,
        cut=cut or None,
        correct=correct,
    )
    lists = selection != RolloutFilter(kind="train") or limit or sort != "step" or reverse or inspect
    if not lists:
        _show_run(history, as_json=json_)
        return
    descending = (sort == "step") != reverse
    limit = limit or (_INSPECT_LIMIT if inspect else _LIMIT)
    page = history.rollouts.find(selection, sort=sort, descending=descending, limit=limit)
    if inspect is not None:
        from tinsmith.rl.history.inspect_log import write_log

        write_log(history, page.rows, inspect)
        sys.stderr.write(
            f"{len(page.rows):,} of {counted(page.total, 'rollout')} in {inspect}: "
            f"inspect view --log-dir {inspect.parent}\n"
        )
        return
    if json_:
        _print_json({"total": page.total, "rollouts": [_row(row) for row in page.rows]})
        return
    from tinsmith.rl.history.console_run import print_rollouts

    print_rollouts(history, page, new_console(highlight=False))


def _show_run(history: RunHistory, *, as_json: bool) -> None:
    if as_json:
        _print_json(_overview(history))
        return
    from tinsmith.rl.history.console_run import print_overview

    print_overview(history, new_console(highlight=False))


def _show_one(history: RunHistory, identity: str, *, group: bool, tokens: Any, thinking: bool, as_json: bool) -> None:
    from tinsmith.rl.history.console_rollout import print_group

    if (row := history.rollouts.row(identity)) is None:
        raise ConfigError(
            f"There is no rollout {identity} in {history.path}.",
            f"A rollout has an ID such as train-12-3: tinsmith show {history.path} --limit 20 lists them.",
        )
    rows: Sequence[RolloutRow] = history.rollouts.group(row) if group else (row,)
    records = [history.rollouts.read(each) for each in rows]
    if as_json:
        shown = [{"id": each.id, **record} for each, record in zip(rows, records, strict=True)]
        _print_json(shown if group else shown[0])
        return
    print_group(rows, records, new_console(highlight=False), measure=tokens or None, thinking=thinking)


def _overview(history: RunHistory) -> dict[str, Any]:
    """What JSON says of a run."""
    from tinsmith.rl.diagnosis import diagnose

    status, metrics = history.status, history.metrics
    diagnosis = diagnose(history.settings, metrics.rows)
    return {
        "name": history.name,
        "folder": str(history.path),
        "state": status.condition,
        "reason": status.reason,
        "step": status.step,
        "steps": history.step_count,
        "summary": diagnosis.summary,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "comparison": history.comparison,
        "results": history.results,
        "metrics": metrics.columns(),
        "stages": [_overview(stage) for stage in history.stages],
        "parts": list(history.parts),
    }


def _row(row: RolloutRow) -> dict[str, Any]:
    return {"id": row.id, **asdict(row)}


def _print_json(value: Any) -> None:
    from tinsmith.chat.strict_json import encode_json

    sys.stdout.write(encode_json(_finite(value), compact=False) + "\n")


def _finite(value: Any) -> Any:
    """The value, with null for numbers that JSON has not."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _part(history: RunHistory, name: str) -> RunHistory:
    parts = history.parts
    if name not in parts:
        names = ", ".join(parts) or "none"
        raise ConfigError(f"{history.path} has no part {name}.", f"Its parts: {names}.")
    return parts[name]


def _steps(text: str) -> tuple[int | None, int | None]:
    low, high = _range("--step", text)
    if any(value is not None and value != int(value) for value in (low, high)):
        raise ConfigError(f"--step {text}: steps are whole numbers.", "Example: --step 10..20")
    return (None if low is None else int(low)), (None if high is None else int(high))


def _range(option: str, text: str) -> tuple[float | None, float | None]:
    """(MIN, MAX) of MIN..MAX, with either left out, or of one number."""
    low, dots, high = text.partition("..")
    try:
        numbers = [float(part) if part.strip() else None for part in (low, high if dots else low)]
    except ValueError:
        numbers = [float("nan")]
    if any(number is not None and not abs(number) < float("inf") for number in numbers):
        raise ConfigError(f"{option} {text!r} is no range.", f"Example: {option} 0..0.5, {option} 1 or {option} ..0")
    return numbers[0], numbers[1]
