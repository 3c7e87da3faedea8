"""The command `tinsmith show`: a run, lists of its rollouts, and single ones, from the files of its folder."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tinsmith.cli.documents.output import AsJson, print_json
from tinsmith.cli.documents.run import run_document
from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from tinsmith.rl.history import RolloutFilter, RolloutRow, RunHistory

Sort = Literal["step", "reward", "tokens", "turns", "advantage", "task"]
Measure = Literal["logprob", "advantage", "difference"]
_LIMIT, _INSPECT_LIMIT = 20, 1_000


def _flag(text: str) -> Parameter:
    return Parameter(help=text, negative="")


def _option(text: str) -> Parameter:
    return Parameter(help=text, allow_leading_hyphen=True)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Listed:
    """Which rollouts to list, and how."""

    step: Annotated[str, _option("List rollouts of this step, or of steps such as 10..20 or 10..")] = ""
    task: Annotated[str, _option("List rollouts of tasks whose name contains this text.")] = ""
    reward: Annotated[str, _option("List rollouts with a reward in this range: MIN..MAX, MIN.. or ..MAX.")] = ""
    role: Annotated[str, _option("List rollouts in which this role took part.")] = ""
    environment: Annotated[str, _option("List rollouts of this environment.")] = ""
    search: Annotated[str, _option("List rollouts whose messages, replies or errors have this text, in any case.")] = ""
    failed: Annotated[bool, _flag("List failed rollouts.")] = False
    cut: Annotated[bool, _flag("List rollouts that reached the limit of tokens.")] = False
    right: Annotated[bool, _flag("List rollouts that are right.")] = False
    wrong: Annotated[bool, _flag("List rollouts that are wrong.")] = False
    eval: Annotated[bool, _flag("List rollouts of evaluations, in place of those of training.")] = False
    sort: Annotated[Sort, Parameter(help="Order. By step: the newest first; else the smallest values first.")] = "step"
    reverse: Annotated[bool, _flag("Reverse the order.")] = False
    limit: Annotated[int, Parameter(help="Most rollouts of a list. 0: 20, or 1,000 with --inspect.")] = 0

    @property
    def selection(self) -> RolloutFilter:
        """The conditions. Raises ConfigError for ranges that are none."""
        from tinsmith.rl.history import RolloutFilter

        return RolloutFilter(
            kind="eval" if self.eval else "train",
            steps=_steps(self.step),
            task=self.task,
            reward=_range("--reward", self.reward),
            role=self.role,
            environment=self.environment,
            search=self.search,
            failed=self.failed or None,
            cut=self.cut or None,
            correct=None if self.right == self.wrong else self.right,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Shown:
    """How to show a rollout."""

    group: Annotated[bool, _flag("With an ID: show all rollouts of its group.")] = False
    tokens: Annotated[
        Measure | None, Parameter(help="With an ID: color tokens; difference: logprob of the trainer less the sampler.")
    ] = None
    thinking: Annotated[bool, _flag("With an ID: show what the model thought before its replies.")] = False


def show(
    run: Annotated[Path | None, Parameter(help="Folder of the run. Default: the most recent one under runs/.")] = None,
    rollout: Annotated[str, Parameter(help="ID of a rollout to show whole, such as train-12-3.")] = "",
    /,
    *,
    listed: Listed = Listed(),
    shown: Shown = Shown(),
    part: Annotated[str, Parameter(help="What another process of the run has recorded: bench or explore.")] = "",
    inspect: Annotated[Path | None, Parameter(help="Write the list to this .eval file, for inspect view.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run: its state, curves and findings; with a condition, its rollouts; with an ID, one of them whole."""
    from tinsmith.cli.log import latest_run
    from tinsmith.rl.history import RunHistory

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding
    history = RunHistory.open(run or latest_run(Path("runs")))
    if part:
        history = _part(history, part)
    if rollout:
        if listed != Listed() or inspect:
            raise ConfigError("Conditions select rollouts of a list.", "Leave out either the ID or the conditions.")
        _show_one(history, rollout, shown, as_json=as_json)
    elif shown != Shown():
        raise ConfigError("--group, --tokens and --thinking need a rollout.", "Example: tinsmith show RUN train-12-3")
    elif listed == Listed() and inspect is None:
        _show_run(history, as_json=as_json)
    else:
        _show_list(history, listed, inspect, as_json=as_json)


def _show_list(history: RunHistory, listed: Listed, inspect: Path | None, *, as_json: bool) -> None:
    if listed.limit < 0:
        raise ConfigError(f"--limit {listed.limit} is below 0.")
    page = history.rollouts.find(
        listed.selection,
        sort=listed.sort,
        descending=(listed.sort == "step") != listed.reverse,
        limit=listed.limit or (_INSPECT_LIMIT if inspect else _LIMIT),
    )
    if inspect is not None:
        from tinsmith.rl.history.inspect_log import write_log

        write_log(history, page.rows, inspect)
        sys.stderr.write(
            f"{len(page.rows):,} of {counted(page.total, 'rollout')} in {inspect}: "
            f"inspect view --log-dir {inspect.parent}\n"
        )
    elif as_json:
        print_json({"total": page.total, "rollouts": [_row(row) for row in page.rows]})
    else:
        from tinsmith.rl.history.console_run import print_rollouts

        print_rollouts(history, page, new_console(highlight=False))


def _show_run(history: RunHistory, *, as_json: bool) -> None:
    if as_json:
        print_json(run_document(history))
        return
    from tinsmith.rl.history.console_run import print_overview

    print_overview(history, new_console(highlight=False))


def _show_one(history: RunHistory, identity: str, shown: Shown, *, as_json: bool) -> None:
    from tinsmith.rl.history.console_rollout import print_group

    if (row := history.rollouts.row(identity)) is None:
        raise ConfigError(
            f"There is no rollout {identity} in {history.path}.",
            f"A rollout has an ID such as train-12-3: tinsmith show {history.path} --limit 20 lists them.",
        )
    rows: Sequence[RolloutRow] = history.rollouts.group(row) if shown.group else (row,)
    records = [history.rollouts.read(each) for each in rows]
    if as_json:
        values = [{"id": each.id, **record} for each, record in zip(rows, records, strict=True)]
        print_json(values if shown.group else values[0])
        return
    print_group(rows, records, new_console(highlight=False), measure=shown.tokens, thinking=shown.thinking)


def _row(row: RolloutRow) -> dict[str, Any]:
    return {"id": row.id, **asdict(row)}


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
