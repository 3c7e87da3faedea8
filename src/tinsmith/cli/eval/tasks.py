"""Tasks of one's own in `tinsmith eval`: a file of rows, a run file, and environments of installed packages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.cli.run_file import RUN_FILES
from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.cli.service.weights import NamedWeights
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.evaluation.endpoint import Endpoint, Sampling
    from tinsmith.rl.evaluation.scores import Scores
    from tinsmith.rl.rewards import Reward
    from tinsmith.rl.run.parts import RunData

SECTIONS = ("tasks", "environments")
"""Sections of a run file of which the command line may set keys: of files of rows, and of environments by name."""
_ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_OF_RUN = ("workflow", "sampling", "plugins", "concurrency", "seed")
"""Keys of a run that apply to rows on which its weights are evaluated."""
_OF_EVAL = ("num_samples", "temperature", "top_p", "top_k", "max_tokens", "workflow", "rewards", "threshold")
"""Keys of its `eval` that do."""


def is_own(name: str) -> bool:
    """Whether a name is one of tasks of one's own, and not of a benchmark."""
    return _kind(name) != "" or _environment(name) is not None


def is_rows(name: str) -> bool:
    """Whether a name is that of a file of rows."""
    return _kind(name) == "rows"


def is_environment(name: str) -> bool:
    """Whether a name is that of an environment of an installed package."""
    return not _kind(name) and _environment(name) is not None


def title(name: str) -> str:
    """The name of tasks in the table."""
    if is_environment(name):
        return Path(name.partition(":")[2]).name.removesuffix(".py")
    return Path(name).parent.name if Path(name).name == "run.yaml" else Path(name).name


def _kind(name: str) -> str:
    path = Path(name)
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return "rows" if suffix in _ROWS else "run file" if suffix in RUN_FILES else ""


def _environment(name: str) -> tuple[str, str] | None:
    """Type and id of an environment, of a name such as verifiers:gsm8k."""
    from tinsmith.rl.environments.registry import BY_ID

    kind, colon, of = name.partition(":")
    return (kind, of) if colon and of and kind in BY_ID else None


@dataclass(frozen=True, slots=True)
class OwnTasks:
    """Tasks of one's own, which are read before a server is needed.

    Example: OwnTasks(title="gsm8k", config=config, data=RunData(config))
    """

    title: str
    config: RunConfig
    data: RunData


def read_tasks(
    name: str, target: NamedWeights, sampling: Sampling, rewards: Sequence[str], overrides: Sequence[str]
) -> OwnTasks:
    """The tasks that a name stands for, to evaluate a target on them; `overrides` are settings of SECTIONS.

    Raises ConfigError if they cannot be read: a file, a package or an environment that is not there, a wrong option.
    """
    from tinsmith.rl.run.parts import RunData

    config = own_config(name, target, sampling, rewards, overrides)
    data = RunData(config)
    _ = data.tasks
    return OwnTasks(title(name), config, data)


def own_config(
    name: str, target: NamedWeights, sampling: Sampling, rewards: Sequence[str], overrides: Sequence[str]
) -> RunConfig:
    """The evaluation of a target on these tasks, as a configuration of mode bench. Raises ConfigError."""
    from tinsmith.overrides import apply_overrides
    from tinsmith.rl.config import RunConfig
    from tinsmith.settings import build

    if _kind(name) == "run file":
        return _of_run_file(Path(name), target, sampling)
    environment = _environment(name)
    if environment:
        values = _of_environment(*environment, sampling)
        overrides = [f"environments.0.{key}" for section, key in _keys(overrides) if section == "environments"]
    else:
        values = _of_rows(name, target, rewards)
        overrides = [_of_source(key) for section, key in _keys(overrides) if section == "tasks"]
    values = {**values, **target.values, "mode": "bench", "name": "eval"}
    values["eval"] = {**values.get("eval", {}), **_changes(sampling)}
    return build(RunConfig, apply_overrides(values, overrides, RunConfig), name)


def _keys(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Section, and key with value, of words such as tasks.prompt={q}."""
    return [(word.partition(".")[0], word.partition(".")[2]) for word in overrides]


def _of_source(word: str) -> str:
    """The setting of the source of a file of rows that a word such as prompt={q} means: a template is a text."""
    key, _, value = word.partition("=")
    return f"tasks.eval.{key}={json.dumps(value) if value.startswith('{') else value}"


def _changes(sampling: Sampling) -> dict[str, Any]:
    """Keys of `eval` that the options set."""
    options = {
        "num_samples": sampling.samples,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "limit": sampling.limit,
    }
    return {key: value for key, value in options.items() if value is not None}


def _of_rows(name: str, target: NamedWeights, rewards: Sequence[str]) -> dict[str, Any]:
    """A file of rows, with the workflow, the rewards and the sampling of the run, if the target is one."""
    run = target.run.settings if target.run else {}
    values = {key: value for key in _OF_RUN if (value := run.get(key))}
    values["eval"] = {key: value for key in _OF_EVAL if (value := (run.get("eval") or {}).get(key)) is not None}
    chosen = [{"type": reward} for reward in rewards] or values["eval"].pop("rewards", None) or run.get("rewards")
    if rewards:
        values["eval"].pop("rewards", None)
    if not chosen:
        raise ConfigError(
            f"{name}: nothing says what its answers are worth.",
            "Give --reward number (math_verify, math_boxed, …), or a run file with tasks.eval and rewards.",
        )
    return {**values, "tasks": {"eval": {"type": "files", "path": name}, "held_out": 0}, "rewards": chosen}


def _of_environment(kind: str, of: str, sampling: Sampling) -> dict[str, Any]:
    from tinsmith.rl.data.tasks import DEFAULT_HELD_OUT

    held_out = sampling.limit or DEFAULT_HELD_OUT
    return {"environments": [{"type": kind, "id": of, "weight": 0, "held_out": held_out}]}


def _of_run_file(file: Path, target: NamedWeights, sampling: Sampling) -> RunConfig:
    """The evaluation of a run file, of its last stage that has one, with the model of the target."""
    from tinsmith.dialects import read_run

    overrides = [f"eval.{key}={value}" for key, value in _changes(sampling).items()]
    if not file.exists():
        raise ConfigError(f"There is no file {file}.")
    stages = [stage for stage in read_run(file, overrides).settings.runs if stage.evaluates]
    if not stages:
        raise ConfigError(
            f"{file} has no held-out tasks with rewards.", "Set tasks.eval or tasks.held_out, and rewards."
        )
    own = target.config
    # Functions and benchmarks have no place in the table by tasks; benchmarks are named on the command line.
    evaluation = stages[-1].eval.model_copy(update={"functions": (), "benchmarks": ()})
    update = {"mode": "bench", "model": own.model, "service": own.service, "folder": own.folder, "eval": evaluation}
    return stages[-1].model_copy(update=update)


async def own_scores(tasks: OwnTasks, names: Sequence[str], endpoint: Endpoint) -> dict[str, Scores]:
    """The scores of models of a server, by their names; `endpoint` is that of their base model."""
    from tinsmith.rl.bench import open_evaluator
    from tinsmith.rl.evaluation.held_out import judged_sources, scores_of
    from tinsmith.rl.policy.tinker_models import TinkerModels

    config = tasks.config
    environments = config.evaluated

    def rewards(source: str) -> Sequence[Reward]:
        return _rewards(environments, source)

    model = config.model.model_copy(update={"name": endpoint.model})
    models = await TinkerModels.connect(model, endpoint.url, endpoint.key)
    async with open_evaluator(config, models, tasks.data) as evaluator:
        groups = {name: (await evaluator.run(0, await models.open_model(name))).groups for name in names}
        threshold = config.eval.threshold
        right = judged_sources(groups.values(), evaluator.sources, threshold)
        return {
            name: scores_of(tasks.title, of_model, evaluator.sources, threshold, rewards, right=right)
            for name, of_model in groups.items()
        }


def _rewards(environments: Mapping[str, Any], source: str) -> Sequence[Reward]:
    from tinsmith.rl.environments.tasks import TasksEnvironment

    environment = environments.get(source)
    return environment.rewards if isinstance(environment, TasksEnvironment) else ()
