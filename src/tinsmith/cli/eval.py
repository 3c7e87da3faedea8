"""The command `tinsmith eval`: a model, a run's weights or a checkpoint on benchmarks, by their names.

Messages go to standard error: with --json, standard output is the scores.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tinsmith.cli.service.weights import SamplingServer, open_weights, settings_among
from tinsmith.errors import ConfigError
from tinsmith.rl.evaluation.endpoint import Endpoint, Sampling
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.evaluation.scores import Scores

Words = Annotated[
    str,
    Parameter(
        name="MODEL|RUN|tinker://… BENCHMARKS",
        help="What to evaluate: a base model, the folder of a run, or a checkpoint. Then benchmarks: a name of "
        "lm-evaluation-harness, such as gsm8k or ifeval, or a task of Inspect, as PACKAGE/TASK or FILE.py@TASK. Words "
        "such as service.engine=fake are settings of the model and of the service that is started.",
        allow_leading_hyphen=False,
    ),
]
_DEFAULTS = Sampling()


def evaluate(
    *words: Words,
    sampling: Annotated[Sampling, Parameter(name="*")] = _DEFAULTS,
    alone: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
    server: SamplingServer | None = None,
) -> None:
    """Evaluate a model, the weights of a run or a checkpoint on benchmarks, through the server's OpenAI API.

    A run and a checkpoint are compared with their base model, problem by problem. For a model, and for a run that had
    a service of its own, a service is started where no server is named.

    Parameters
    ----------
    alone
        Do not evaluate the base model of a run or a checkpoint too.
    out
        File for the scores, as JSON.
    json_
        Print the scores as JSON.
    """
    from tinsmith.rl.evaluation import scores

    target, benchmarks, overrides = _parsed(words)
    sampling.check()
    console = new_console(stderr=True, soft_wrap=True)
    with ExitStack() as stack:
        endpoint, weights = _endpoint(stack, target, overrides, server, console)
        names = [endpoint.model] if not weights else [weights] if alone else [endpoint.model, weights]
        models = {
            name: _scores(replace(endpoint, model=name), benchmarks, sampling, console) for name in dict.fromkeys(names)
        }
    rows = scores.estimates(models, sampling.seed)
    scores.print_table(console, rows)
    text = json.dumps([row.row for row in rows], indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if json_:
        sys.stdout.write(text + "\n")


def _parsed(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The model, the benchmarks and the settings among the words."""
    others, overrides = settings_among(words, "eval")
    target, *benchmarks = others or [""]
    if not target or not benchmarks:
        raise ConfigError(
            "tinsmith eval needs what to evaluate, and a benchmark.", "Example: tinsmith eval runs/addition gsm8k"
        )
    return target, benchmarks, overrides


def _scores(endpoint: Endpoint, benchmarks: Sequence[str], sampling: Sampling, console: Console) -> Scores:
    from tinsmith.rl.evaluation import inspect_tasks, lm_harness

    made: dict[str, Any] = {}
    for name in benchmarks:
        console.print(f"{endpoint.model}: {name}", highlight=False, markup=False)
        is_inspect = "/" in name or "@" in name or name.endswith(".py")
        made |= (inspect_tasks if is_inspect else lm_harness).run(name, endpoint, sampling)
    return made


def _endpoint(
    stack: ExitStack, target: str, overrides: Sequence[str], server: SamplingServer | None, console: Console
) -> tuple[Endpoint, str]:
    """The base model on its server, which is started if it must be, and the path of the weights, if there are any."""
    from tinsmith.rl.evaluation.endpoint import Endpoint
    from tinsmith.terminal import waiting

    folder = Path(stack.enter_context(TemporaryDirectory()))
    weights = open_weights(stack, target, overrides, folder, console, server=server)
    with waiting(console, f"Loading the tokenizer of {target}"):
        base = asyncio.run(_save_tokenizer(weights.url, weights.key, weights.base, weights.path, folder))
    return Endpoint(url=weights.url, key=weights.key, model=base, tokenizer=folder), weights.path


async def _save_tokenizer(url: str, key: str, base: str, weights: str, folder: Path) -> str:
    """Write the tokenizer of the base model to a folder. Returns its name, which the server knows for a checkpoint."""
    from tinsmith.rl.policy.models import ModelConfig
    from tinsmith.rl.policy.tinker_models import TinkerModels, base_model_of

    name = await base_model_of(weights, url, key) if base.startswith("tinker://") else base
    models = await TinkerModels.connect(ModelConfig(name=name), url, key)
    try:
        models.chat.save_tokenizer(folder)
    finally:
        await models.close()
    return name
