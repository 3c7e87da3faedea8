"""The command `tinsmith eval`: a model, a run's weights or a checkpoint on benchmarks and on tasks of one's own.

Messages go to standard error: with --json, standard output is the scores.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tinsmith.cli.documents.output import AsJson
from tinsmith.cli.service.folder import temporary_folder
from tinsmith.cli.service.weights import (
    CheckpointChoice,
    SamplingServer,
    find_weights,
    open_chat,
    open_server,
    settings_among,
)
from tinsmith.errors import ConfigError
from tinsmith.rl.evaluation.endpoint import Endpoint, Sampling
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.cli.eval.tasks import OwnTasks
    from tinsmith.cli.service.weights import NamedWeights

Words = Annotated[
    str,
    Parameter(
        name="MODEL|RUN|tinker://… NAMES",
        help="What to evaluate: a base model, the folder of a run, or a checkpoint. Then on what: a benchmark of "
        "lm-evaluation-harness, such as gsm8k or ifeval; a task of Inspect, as PACKAGE/TASK or FILE.py@TASK; a file of "
        "rows, such as rows.jsonl; a run file, for its held-out tasks; verifiers:NAME. A run alone is evaluated on its "
        "own held-out tasks. Words such as service.engine=fake are settings of model and service, "
        "tasks.answer_after='####' of the files of rows, and environments.args.split=test of the environments.",
        allow_leading_hyphen=False,
    ),
]
_DEFAULTS = Sampling()


def evaluate(
    *words: Words,
    sampling: Annotated[Sampling, Parameter(name="*")] = _DEFAULTS,
    reward: tuple[str, ...] = (),
    choice: CheckpointChoice | None = None,
    alone: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    as_json: AsJson = False,
    server: SamplingServer | None = None,
) -> None:
    """Evaluate a model, the weights of a run or a checkpoint on benchmarks and on tasks of your own.

    A run and a checkpoint are compared with their base model, problem by problem. For a model, and for a run that had
    a service of its own, a service is started where no server is named.

    Parameters
    ----------
    reward
        Reward of the rows of a file, such as number or math_verify, once for each. Default: those of the run.
    alone
        Do not evaluate the base model of a run or a checkpoint too.
    out
        File for the scores, as JSON.
    """
    from tinsmith.cli.eval.tasks import is_own, read_tasks
    from tinsmith.rl.evaluation import scores
    from tinsmith.terminal import waiting

    named, names, settings, of_tasks = _parsed(words)
    console = new_console(stderr=True, soft_wrap=True)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        target = find_weights(named, settings, folder, choice)
        names = names or [_own_file(named, target)]
        _check(names, sampling, reward, of_tasks)
        own = {name: read_tasks(name, target, sampling, reward, of_tasks) for name in names if is_own(name)}
        address = open_server(stack, target, console, server)
        with waiting(console, f"Loading the tokenizer of {named}"):
            base, codec = asyncio.run(open_chat(target.config.model.name, target.path, *address))
            codec.save_tokenizer(folder)
        endpoint = Endpoint(url=address[0], key=address[1], model=base, tokenizer=folder)
        models = [base] if not target.path else [target.path] if alone else [base, target.path]
        made = _scores(endpoint, names, list(dict.fromkeys(models)), own, sampling, console)
    rows = scores.estimates(made, sampling.seed)
    scores.print_table(console, rows)
    text = json.dumps([row.row for row in rows], indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        sys.stdout.write(text + "\n")


def _parsed(words: Sequence[str]) -> tuple[str, list[str], list[str], list[str]]:
    """The model, on what to evaluate it, settings of model and service, and settings of tasks of one's own."""
    from tinsmith.cli.eval.tasks import SECTIONS

    others, overrides = settings_among(words, "eval", ("model", "service", *SECTIONS))
    target, *names = others or [""]
    if not target or (not names and not Path(target).is_dir()):
        missing = f" There is no folder {target}." if target else ""
        raise ConfigError(
            f"tinsmith eval needs what to evaluate, and a benchmark or tasks.{missing}",
            "Example: tinsmith eval runs/addition gsm8k rows.jsonl",
        )
    of_tasks = [word for word in overrides if word.partition(".")[0] in SECTIONS]
    return target, names, [word for word in overrides if word not in of_tasks], of_tasks


def _own_file(name: str, target: NamedWeights) -> str:
    """The file with a run's own evaluation. Raises ConfigError for what is no run."""
    if target.run is None:
        raise ConfigError(f"tinsmith eval {name} needs a benchmark or tasks.", "Example: tinsmith eval MODEL gsm8k")
    return str(target.run.layout.settings)


def _check(names: Sequence[str], sampling: Sampling, rewards: Sequence[str], of_tasks: Sequence[str]) -> None:
    """Raise ConfigError for options that nothing among `names` uses, for values that cannot be sampled with, and for a
    benchmark whose package is not installed."""
    from tinsmith.cli.eval.tasks import is_environment, is_own, is_rows
    from tinsmith.rl.evaluation.libraries import check_package, is_inspect

    benchmarks = [name for name in names if not is_own(name)]
    sampling.check(benchmarks=bool(benchmarks))
    harness = [name for name in benchmarks if not is_inspect(name)]
    if not harness and (sampling.chat or sampling.include):
        option = "--chat" if sampling.chat else "--include"
        raise ConfigError(f"{option} is used by benchmarks of lm-evaluation-harness only.", "Leave it out.")
    of_rows = [*(["--reward"] if rewards else ()), *(f"'{word}'" for word in of_tasks if word.startswith("tasks."))]
    if not any(map(is_rows, names)) and of_rows:
        raise ConfigError(f"{of_rows[0]} is used by files of rows only, such as rows.jsonl.", "Leave it out.")
    of_environments = [word for word in of_tasks if word.startswith("environments.")]
    if not any(map(is_environment, names)) and of_environments:
        raise ConfigError(
            f"'{of_environments[0]}' is used by environments only, such as verifiers:NAME.", "Leave it out."
        )
    for name in benchmarks:
        try:
            check_package(name)
        except ConfigError as error:
            raise ConfigError(error.message, f"{error.hint}. An environment is named verifiers:NAME.") from error


def _scores(
    endpoint: Endpoint,
    names: Sequence[str],
    models: Sequence[str],
    own: Mapping[str, OwnTasks],
    sampling: Sampling,
    console: Console,
) -> dict[str, dict[str, Any]]:
    """The scores of each model on everything that is named; `own` are the tasks of one's own."""
    from tinsmith.cli.eval.tasks import own_scores
    from tinsmith.rl.evaluation import libraries

    made: dict[str, dict[str, Any]] = {model: {} for model in models}
    for name in names:
        console.print(f"{' and '.join(models)}: {name}", highlight=False, markup=False)
        if name in own:
            scores = asyncio.run(own_scores(own[name], models, endpoint))
        else:
            scores = {model: libraries.run(name, replace(endpoint, model=model), sampling) for model in models}
        for model in models:
            made[model] |= scores[model]
    return made
