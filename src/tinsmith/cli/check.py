"""The command `tinsmith check`: a run file, its data, its images and its monitors, without starting anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tinsmith.cli.run_file import Config, FileAndOverrides, PluginDir, file_and_overrides, read_with_notes, with_plugins
from tinsmith.errors import ConfigError, Unreachable
from tinsmith.imports import has_torch
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.run.parts import RunData
    from tinsmith.rl.types import Message

EXAMPLES = 3
"""Prompts to show of each kind of data."""


def check(
    *words: FileAndOverrides,
    config: Config = None,
    plugin_dir: PluginDir = None,
    offline: Annotated[
        bool, Parameter(negative=(), help="Do not ask the hub; its datasets are opened if they were downloaded before.")
    ] = False,
    gradients: Annotated[
        bool, Parameter(negative=(), help="Check the gradient of the policy loss by finite differences.")
    ] = False,
) -> None:
    """Check a run file and its data without starting anything, and note keys that have no effect.

    Reads all rows as the run does, shows the first prompts, and counts tasks, held-out tasks and steps of an epoch.
    Data that cannot be reached, because it needs a network or credentials, is noted. Also checks on this machine what
    the monitors need: packages, API keys, servers that respond; and, for tasks with images, whether the model takes
    them, as its server or its folder says. Lists the parts of your own that the file uses, with their places, and
    computes a policy loss of your own on random tokens. Exits with 0, or with 2 after listing every error with its fix.
    """
    file, overrides = file_and_overrides("check", words, config)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    run_file = read_with_notes(file, with_plugins(overrides, plugin_dir))
    _check_packages(run_file.settings)
    _check_monitors(run_file.settings)
    _check_images(run_file.settings)
    for line in _parts_lines(run_file.settings, gradients=gradients):
        sys.stdout.write(f"{line}\n")
    for line in _data_lines(run_file.settings):
        sys.stdout.write(f"{line}\n")
    dialect = f", a file of {run_file.dialect}," if run_file.dialect else ""
    sys.stdout.write(f"{file}{dialect} is valid: {_summary(run_file.settings)}\n")


def _check_packages(run: RunConfig) -> None:
    """Note that a run without a server needs PyTorch. Raises ConfigError for a loss that needs it, if it is missing,
    and for a checkpoint of another server."""
    from tinsmith.rl.algorithms.algorithm import check_packages
    from tinsmith.runner import check_checkpoints, starts_service

    check_checkpoints(run)
    for stage in run.runs:
        if stage.mode not in ("explore", "bench"):
            check_packages(stage.algorithm, stage.updates)
    if starts_service(run) and run.service.engine == "torch" and not has_torch():
        sys.stderr.write(
            "note: the run starts a service of its own, whose engine needs PyTorch: pip install 'tinsmith[serve]', "
            "or set model.base_url or TINKER_BASE_URL\n"
        )


def _parts_lines(run: RunConfig, *, gradients: bool) -> Iterator[str]:
    """Lines about the parts of one's own, and about gradients. Raises ConfigError for a loss that is wrong."""
    from tinsmith.rl.algorithms.losses.user_code import CustomLoss
    from tinsmith.rl.plugin_files import described_parts

    stages = run.runs
    yield from dict.fromkeys(line for stage in stages for line in described_parts(stage))
    checked: list[Any] = []
    for stage in stages:
        loss = stage.algorithm.loss
        if stage.mode in ("explore", "bench") or loss in checked or not (gradients or isinstance(loss, CustomLoss)):
            continue
        checked.append(loss)
        yield from _loss_lines(stage, gradients=gradients)


def _loss_lines(stage: RunConfig, *, gradients: bool) -> Iterator[str]:
    """Try the policy loss of a stage. Raises ConfigError if it fails, or if its gradient is not that of its value."""
    from tinsmith.imports import require_torch
    from tinsmith.rl.algorithms.gradient_check import check_gradient, try_loss

    algorithm = stage.algorithm
    require_torch("checking a policy loss")
    if not gradients:
        try_loss(algorithm.loss)
        return
    check = check_gradient(algorithm.loss, algorithm.aggregate, pairs=algorithm.learns_from == "pairs")
    if not check.equal:
        raise ConfigError(
            f"The gradient of algorithm.loss {algorithm.loss.type} is {check.gradient:.6g} at a token where finite "
            f"differences give {check.differences:.6g}.",
            "Correct its backward; values that are constants are those of detach() and torch.no_grad().",
        )
    yield (
        f"gradient of algorithm.loss {algorithm.loss.type}: equal to finite differences at {check.tokens} random "
        f"tokens (largest difference {check.error:.1g} of the largest gradient)"
    )


def _check_images(run: RunConfig) -> None:
    """Raises ConfigError for tasks with images on a model that takes none."""
    from tinsmith.rl.run.parts import image_field
    from tinsmith.runner import takes_images

    for stage in run.runs:
        if (field := image_field(stage)) and takes_images(stage) is False:
            raise ConfigError(
                f"The tasks have images in their field {field!r}, and the model {stage.model.name} takes none.",
                "Use a vision-language model (docs/train/images.md), or remove images from the source.",
            )


def _check_monitors(run: RunConfig) -> None:
    """Print notes on the monitors. Raises ConfigError for one that cannot run on this machine."""

    from tinsmith.rl.record import monitors
    from tinsmith.rl.run.parts import folder_path

    configs = [config for stage in run.runs if stage.mode != "bench" for config in stage.monitors]
    monitors.announce(
        [config for at, config in enumerate(configs) if config not in configs[:at]],
        folder_path(run),
        new_console(stderr=True),
    )


def _data_lines(run: RunConfig) -> Iterator[str]:
    """Numbers of rows and examples of each stage. Raises ConfigError for data that the run cannot use."""
    from tinsmith.rl.run.parts import RunData, resolve_steps

    read: list[tuple[tuple[Any, ...], RunData]] = []
    for stage in run.runs:
        key = (stage.tasks, stage.environments, stage.demonstrations, stage.algorithm.type, stage.mode, stage.seed)
        data = next((earlier for settings, earlier in read if settings == key), None)
        try:
            resolve_steps(stage, data or RunData(stage))
            prefix = f"stage {stage.name.removeprefix(run.name).strip()}: " if run.stages else ""
            lines = list(_counts(stage, data or (data := RunData(stage))))
        except Unreachable as error:
            yield from _unopened(stage, error)
            continue
        yield from (f"{prefix}{line}" for line in lines)
        if all(settings != key for settings, _ in read):
            read.append((key, data))
            yield from _examples(stage, data)


def _unopened(stage: RunConfig, error: Unreachable) -> Iterator[str]:
    """Lines about data that was not opened. Raises ConfigError for other data of the stage that cannot be used."""
    from tinsmith.rl.data.sources import as_tuple

    named = stage.tasks.eval
    evaluated = named.values() if isinstance(named, dict) else as_tuple(named)
    loads = [source.load for source in (*stage.tasks.sources, *evaluated)]
    texts = {str(error): None}
    for load in (*loads, stage.demonstrations.load) if stage.demonstrations else loads:
        try:
            load()
        except Unreachable as other:
            texts[str(other)] = None
    yield from (f"not opened: {text}" for text in texts)


def _counts(stage: RunConfig, data: RunData) -> Iterator[str]:
    sampler, held_out = data.tasks
    names = [f"{name} {len(tasks):,}" if name else f"{len(tasks):,}" for name, tasks in held_out.items()]
    evaluated = f"{', '.join(names)} held out" if any(held_out.values()) else "none held out"
    if stage.demonstrations is not None:
        count = sum(map(len, data.demonstrations))
        alone = not stage.uses_rollouts
        per_step = stage.demonstrations.count(stage.groups_per_step, stage.group_size, alone=alone)
        yield f"data: {counted(count, 'demonstration')}, {_per_epoch(count, per_step)}"
    if stage.samples and sampler.size:
        steps = _per_epoch(sampler.size, stage.groups_per_step)
        yield f"data: {counted(sampler.size, 'task')} to train on, {evaluated}; {steps}"
    elif any(held_out.values()):
        yield f"data: {evaluated}"


def _per_epoch(rows: int, per_step: int) -> str:
    return f"{rows / per_step:.4g} steps per epoch, of {per_step:,} each"


def _examples(stage: RunConfig, data: RunData) -> Iterator[str]:
    """The first rows to train on, or to evaluate if none are sampled. Raises ConfigError if all are held out."""
    sampler, held_out = data.tasks
    for demonstration in [each for part in data.demonstrations for each in part[:EXAMPLES]][:EXAMPLES]:
        yield _example(demonstration.id, demonstration.messages[:-1], demonstration.messages[-1].content)
    tasks = sampler.draw(EXAMPLES) if stage.samples and sampler.size else []
    for task in tasks or [task for part in held_out.values() for task in part[:EXAMPLES]][:EXAMPLES]:
        yield _example(task.id, task.messages, task.answer)


def _example(name: str, messages: Sequence[Message], answer: str) -> str:
    prompt = next((message.content for message in reversed(messages) if message.role == "user"), "")
    return f"  {name}: {_short(prompt)} -> {_short(answer)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _summary(run: RunConfig) -> str:
    """A run in one line."""
    if run.stages:
        stages = [
            f"{stage.name} ({''.join(_task_and_length(settings))})"
            for stage, settings in zip(run.stages, run.runs, strict=True)
        ]
        return f"{counted(len(stages), 'stage')} on {run.model.name}: {', '.join(stages)}"
    mode = f"mode {run.mode}, " if run.mode in ("explore", "train") else ""
    task, length = _task_and_length(run)
    return f"{mode}{task} on {run.model.name}{length}"


def _task_and_length(run: RunConfig) -> tuple[str, str]:
    if run.mode == "bench":
        return "comparison of checkpoints", ""
    environments = f" with {counted(len(run.environments), 'environment')}" if run.environments else ""
    length = counted(run.steps, "step") if run.steps else counted(run.epochs or 0, "epoch")
    return f"{run.algorithm.title}{environments}", f", {length}"
