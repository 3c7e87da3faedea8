"""The command `tinsmith check`: a run file, its data, its images and its monitors, without starting anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tinsmith.cli.documents.data import read_data
from tinsmith.cli.documents.output import AsJson, messages_on_stderr, print_json
from tinsmith.cli.run_file import Config, FileAndOverrides, PluginDir, file_and_overrides, read_with_notes, with_plugins
from tinsmith.errors import ConfigError
from tinsmith.imports import has_torch
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from tinsmith.rl.config import RunConfig


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
    as_json: AsJson = False,
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
    with messages_on_stderr(as_json):
        run_file = read_with_notes(file, with_plugins(overrides, plugin_dir))
        run = run_file.settings
        _check_packages(run)
        _check_monitors(run)
        _check_images(run)
        parts = list(_parts_lines(run))
        checked = list(_checked_losses(run, gradients=gradients))
        data = list(read_data(run))
    if as_json:
        print_json(
            {
                "file": str(file),
                "dialect": run_file.dialect,
                "notes": list(run_file.notes),
                "name": run.name,
                "model": run.model.name,
                "mode": run.mode,
                "summary": _summary(run),
                "parts": parts,
                "gradients": checked,
                "data": [each.document for each in data],
            }
        )
        return
    for line in (*parts, *checked, *(line for each in data for line in each.lines)):
        sys.stdout.write(f"{line}\n")
    dialect = f", a file of {run_file.dialect}," if run_file.dialect else ""
    sys.stdout.write(f"{file}{dialect} is valid: {_summary(run)}\n")


def _check_packages(run: RunConfig) -> None:
    """Note that a run without a server needs PyTorch. Raises ConfigError for a loss that needs it and for benchmarks
    that need a package, if it is missing, and for a checkpoint of another server."""
    from tinsmith.rl.algorithms.algorithm import check_packages
    from tinsmith.rl.evaluation.libraries import check_package
    from tinsmith.runner import check_checkpoints, starts_service

    check_checkpoints(run)
    for stage in run.runs:
        if stage.mode not in ("explore", "bench"):
            check_packages(stage.algorithm, stage.updates)
        for benchmark in stage.eval.benchmarks:
            check_package(benchmark.name)
    if starts_service(run) and run.service.engine == "torch" and not has_torch():
        sys.stderr.write(
            "note: the run starts a service of its own, whose engine needs PyTorch: pip install 'tinsmith[serve]', "
            "or set model.base_url or TINKER_BASE_URL\n"
        )


def _parts_lines(run: RunConfig) -> Iterator[str]:
    """Lines about the parts of one's own."""
    from tinsmith.rl.plugin_files import described_parts

    yield from dict.fromkeys(line for stage in run.runs for line in described_parts(stage))


def _checked_losses(run: RunConfig, *, gradients: bool) -> Iterator[str]:
    """Lines about gradients. Raises ConfigError for a policy loss that is wrong."""
    from tinsmith.rl.algorithms.losses.user_code import CustomLoss

    checked: list[Any] = []
    for stage in run.runs:
        loss = stage.algorithm.loss
        if stage.mode in ("explore", "bench") or loss in checked or not (gradients or isinstance(loss, CustomLoss)):
            continue
        checked.append(loss)
        yield from _loss_lines(stage, gradients=gradients)


def _loss_lines(stage: RunConfig, *, gradients: bool) -> Iterator[str]:
    """Try the policy loss of a stage. Raises ConfigError if it fails, or if its gradient is not that of its value."""
    from tinsmith.imports import require_torch
    from tinsmith.rl.algorithms.gradient_check import check_gradient, try_loss
    from tinsmith.rl.algorithms.losses.user_code import CustomLoss
    from tinsmith.rl.plugins import path_text

    algorithm, loss = stage.algorithm, stage.algorithm.loss
    require_torch("checking a policy loss")
    if not gradients:
        try_loss(loss)
        return
    name = path_text(loss.path).rpartition(":")[2] if isinstance(loss, CustomLoss) else loss.type
    check = check_gradient(loss, algorithm.aggregate, pairs=algorithm.learns_from == "pairs")
    if not check.equal:
        raise ConfigError(
            f"The gradient of algorithm.loss {name} is {check.gradient:.6g} at a token where finite "
            f"differences give {check.differences:.6g}.",
            "Correct its backward; values that are constants are those of detach() and torch.no_grad().",
        )
    yield (
        f"gradient of algorithm.loss {name}: equal to finite differences at {check.tokens} random "
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
