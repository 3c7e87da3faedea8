"""Mode bench: evaluate checkpoints on the held-out tasks with the same seeds, without training.

bench/results.json                 the metrics of each checkpoint
bench/comparison.tsv, .json        the other checkpoints against the first, task by task (comparison/)
bench/rollouts/eval-000002.jsonl   the rollouts of checkpoint 2
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopRequested, StopSignal
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.policy.chat import ChatCodec
from tinsmith.rl.policy.models import Models
from tinsmith.rl.policy.request_limit import RequestLimit
from tinsmith.rl.record import comparison
from tinsmith.rl.record.layout import BENCH
from tinsmith.rl.record.metrics import measures_right
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.record.monitors.jsonl import JsonlMonitor
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.parts import (
    RunData,
    check_images,
    eval_context,
    eval_workflow_maker,
    folder_path,
    open_environments,
)
from tinsmith.rl.run.state import read_state


async def bench(
    config: RunConfig,
    connect: Callable[[], Awaitable[Models]],
    console: Console,
    of: Path | None = None,
    stop: StopSignal | None = None,
) -> list[dict[str, float | str]]:
    """Evaluate every checkpoint. Returns a row of metrics for each; also prints and writes them.

    `of` is the folder of the run that saved the checkpoints, if it is not this run's folder. At `stop`, the evaluation
    in progress has the grace period to finish, and the others are left out.
    """
    stop = stop or StopSignal()
    of = of or folder_path(config)
    names = checkpoint_names(config, of)
    if names == [config.model.name]:
        console.print(
            f"Only the base model is evaluated: {of} holds no checkpoint.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    rows: list[dict[str, float | str]] = []
    results: list[tuple[str, list[comparison.TaskResult]]] = []
    compared: list[comparison.EvaluationComparison] = []
    settings = config.model_dump(mode="json")
    with closing(RunFolder.open(folder_path(config), settings, resume=config.resume is True, part=BENCH)) as folder:
        layout = folder.layout.part(BENCH)
        models = await connect()
        async with open_evaluator(config, models) as evaluator:
            jsonl = JsonlMonitor(_info(config, layout.path, len(names), models.chat))
            stop.begin("the comparison stops after this model")
            try:
                for number, name in enumerate(names, 1):
                    with console.status(f"{number} of {len(names)}: {name}"):
                        model = await models.open_model(name)
                        evaluation = await stop.finish(partial(evaluator.run, 0, model))
                    jsonl.rollouts(number, "eval", evaluation.groups)
                    rows.append({"checkpoint": name, **evaluation.values})
                    _write(layout.results, rows)
                    results.append((name, comparison.results_of(evaluation.groups, config.eval.threshold)))
                    if number > 1:
                        compared += comparison.compare_results(results[0], results[-1], evaluator.sources, config.seed)
                        comparison.write(layout.path, compared)
            except StopRequested:
                stop.stopped_at = f"{len(rows)} of {len(names)} models"
            finally:
                jsonl.close()
    if rows:
        _print(console, rows, compared)
    return rows


def _info(config: RunConfig, folder: Path, steps: int, chat: ChatCodec) -> RunInfo:
    return RunInfo(name=config.name, folder=folder, steps=steps, decode=chat.decode, token_text=chat.token_text)


def checkpoint_names(config: RunConfig, path: Path) -> list[str]:
    """Names of the models to compare: the base model, then checkpoints. Raises ConfigError if there are none."""
    names = list(config.bench.checkpoints)
    if not names and (state := read_state(path)) is not None:
        last = state.sampling_path or state.path  # an unfinished run has no sampling checkpoint
        saved = [paths[0] for paths in state.checkpoints if paths[0] != state.path]
        names = [*saved, last] if config.bench.of_run == "all" else [last]
    if config.bench.base:
        names = [config.model.name, *names]
    if not names:
        raise ConfigError(
            "There is no model to compare.", "Set bench.checkpoints to tinker:// paths, or bench.base to true."
        )
    return names


@asynccontextmanager
async def open_evaluator(config: RunConfig, models: Models, data: RunData | None = None) -> AsyncIterator[Evaluator]:
    """What evaluates models of a server on the held-out tasks of a configuration; `models` is closed at the end.

    `data`: that of the configuration, if it is read already.
    """
    data, resources = data or RunData(config), RolloutResources()
    runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
    await check_images(data, models)
    models.on_outage(runner.requests.suspend)
    try:
        await open_environments(config, None, resources)
        yield Evaluator(
            config.eval,
            data.tasks[1],
            eval_workflow_maker(config, resources),
            config.seed,
            runner,
            context=eval_context(config, resources),
        )
    finally:
        await resources.close()
        await models.close()


def _write(file: Path, rows: Sequence[Mapping[str, float | str]]) -> None:
    """Write the rows, with null for numbers that are not finite, which JSON has not."""
    finite = [
        {name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in row.items()}
        for row in rows
    ]
    atomic_write(file, json.dumps(finite, indent=2).encode())


def _print(
    console: Console, rows: Sequence[Mapping[str, float | str]], compared: Sequence[comparison.EvaluationComparison]
) -> None:
    """Print the metrics of all models, and the comparisons with the first, by the numbers of the models."""
    numbers = {str(row["checkpoint"]): str(number) for number, row in enumerate(rows, 1)}
    for name, number in numbers.items():
        console.print(f"{number}  {name}", highlight=False, markup=False, soft_wrap=True)
    console.print(_table(rows))
    numbered = [replace(each, first=numbers[each.first], second=numbers[each.second]).row for each in compared]
    comparison.print_tables(console, numbered)


def _table(rows: Sequence[Mapping[str, float | str]]) -> Table:
    """A table with one numbered column per checkpoint."""
    table = Table("", *(str(number) for number in range(1, len(rows) + 1)))
    right = measures_right([{name: value for name, value in row.items() if isinstance(value, float)} for row in rows])
    for name in rows[0]:
        if "/pass@" in name and not right:
            continue
        if name.startswith("eval/") and name not in ("eval/tasks", "eval/failed", "eval/judged"):
            table.add_row(name.removeprefix("eval/"), *(f"{row[name]:.4g}" for row in rows))
    return table
