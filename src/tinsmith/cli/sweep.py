"""The command `tinsmith sweep`: a run file with several values of some settings, all runs at once at one service.

Messages go to standard error: with --json, standard output is the outcome. Each run is a process that does what
`tinsmith run` does and ends with its parent: on Linux a fork of one that has imported what runs need, elsewhere
`python -m tinsmith.cli.sweep run …`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from tinsmith.cli.documents.output import AsJson
from tinsmith.cli.run_file import PluginDir, as_run_file, file_and_overrides, with_plugins
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.ending.stop import StopSignal
    from tinsmith.rl.sweep.control import Child, Halving
    from tinsmith.rl.sweep.folder import RunRecord, SweepFolder
    from tinsmith.rl.sweep.members import Member

Words = Annotated[
    str,
    Parameter(
        name="FILE KEY=VALUES",
        help="The run file, then settings: with one value for all runs, such as steps=20, or with several, such as "
        "optimizer.learning_rate=1e-4,3e-4 or seed=0..2. Every combination is a run.",
        allow_leading_hyphen=False,
    ),
]


def sweep(
    *words: Words,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    metric: str = "",
    better: Literal["higher", "lower"] = "higher",
    halve: int = 0,
    at_once: int = 0,
    server: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    out: Path | None = None,
    time_limit: str | None = None,
    as_json: AsJson = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Train a run file with every combination of several values of its settings, all runs at once at one service.

    The same command continues a sweep that was stopped or killed, and adds the runs of values that are new.

    Parameters
    ----------
    list_
        Print the combinations, and run nothing.
    metric
        Metric to compare the runs by. Default: eval/reward/mean, or reward/mean where nothing is evaluated.
    better
        Whether higher or lower values of the metric are better.
    halve
        End settings early: of every N, only the best goes on, after 1/N of the steps, and again after each N-th part.
        0: none is ended.
    at_once
        Largest number of runs at the same time. Default: all.
    server
        URL of a server to use, instead of a service on this machine; several: the runs are divided among them.
    out
        Folder of the sweep. Default: the run's folder with -sweep after it.
    time_limit
        Stop after this time, such as 5h50m, with checkpoints that the same command continues from, and exit with 75.
    """
    from tinsmith.rl.sweep.members import metric_of

    file, overrides = file_and_overrides("sweep", words, None)
    base, members, folder = _members(file, with_plugins(overrides, plugin_dir), out)
    if list_:
        _print_list(members, as_json=as_json)
        return
    _check_counts(halve, at_once)
    rules = Rules(metric or metric_of(members), lower=better == "lower", share=halve)
    _sweep(file, base, members, folder, rules, at_once, server, _stop_signal(time_limit, base), as_json=as_json)


@dataclass(frozen=True, slots=True)
class Rules:
    """How the runs of a sweep are compared.

    Example: Rules("eval/reward/mean", lower=False, share=3)
    """

    metric: str
    lower: bool
    share: int
    """Of so many settings one goes on; 0: all do."""


def _sweep(
    file: Path,
    base: RunConfig,
    members: Sequence[Member],
    folder: SweepFolder,
    rules: Rules,
    at_once: int,
    servers: Sequence[str],
    stop: StopSignal,
    *,
    as_json: bool,
) -> None:
    """Run the members, and write and print the outcome."""
    from tinsmith.rl.sweep import results
    from tinsmith.rl.sweep.control import SweepRun

    console = new_console(stderr=True, soft_wrap=True)
    halving = _halving(members, rules) if rules.share else None
    with ExitStack() as stack, stop.at_signals():
        stack.enter_context(folder.locked())
        start = _starter(stack, file, folder, members, base, servers)
        console.print(f"{counted(len(members), 'run')} in {folder.path}", highlight=False, markup=False)
        stop.begin("the runs of the sweep stop after their steps and save checkpoints")
        runs = SweepRun(
            members=members,
            folder=folder,
            start=start,
            at_once=at_once or len(members),
            report=lambda text: console.print(text, highlight=False, markup=False),
            servers=servers,
            halving=halving,
            stop=stop,
        )
        statuses = runs.run()
    result = results.outcome(members, statuses, rules.metric, lower=rules.lower)
    results.write(folder, base.name, result)
    results.print_table(console, result)
    console.print(f"[dim]outcome[/]  {folder.page}", highlight=False)
    if (best := next((each for each in members if each.name == result.best), None)) is not None:
        _write_best(folder, base, best)
        console.print(f"[dim]   best[/]  {folder.best}  ({best.name})", highlight=False)
    if as_json:
        sys.stdout.write(json.dumps(result.as_json(), allow_nan=False) + "\n")
    _exit(stop, base, list(statuses.values()), bool(runs.refused))


def _members(file: Path, words: Sequence[str], out: Path | None) -> tuple[RunConfig, list[Member], SweepFolder]:
    """The settings of the first run in the sweep's folder, all runs, and the folder. Raises ConfigError for a fault in
    any of them."""
    from tinsmith.dialects import read_run
    from tinsmith.rl.run.parts import folder_path
    from tinsmith.rl.sweep.combinations import combinations
    from tinsmith.rl.sweep.folder import SweepFolder
    from tinsmith.rl.sweep.members import Member

    made = combinations(words)
    configs = [read_run(file, each.overrides).settings for each in made]
    if configs[0].mode != "both":
        raise ConfigError(f"mode {configs[0].mode} cannot be swept.", "Leave out mode: runs sample and train.")
    folder = SweepFolder(out.expanduser() if out else Path(f"{folder_path(configs[0])}-sweep"))
    name = configs[0].name
    changes = [{"folder": str(folder.run(each.name)), "name": f"{name} {each.name}"} for each in made]
    members = [
        Member(each, config.model_copy(update=change))
        for each, config, change in zip(made, configs, changes, strict=True)
    ]
    return configs[0].model_copy(update={"folder": str(folder.path)}), members, folder


def _print_list(members: Sequence[Member], *, as_json: bool) -> None:
    if as_json:
        rows = [{"name": each.name, "values": dict(each.combination.values)} for each in members]
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for member in members:
        sys.stdout.write(f"{'  '.join(f'{key}={text}' for key, text in member.combination.values.items())}\n")
    sys.stdout.write(f"{counted(len(members), 'run')}\n")


def _check_counts(halve: int, at_once: int) -> None:
    if halve < 0 or halve == 1:
        raise ConfigError(f"--halve is {halve}; of every N settings one goes on.", "Give 2 or more, such as 3.")
    if at_once < 0:
        raise ConfigError(f"--at-once is {at_once}.", "Give a number of runs, or leave it out for all.")


def _stop_signal(time_limit: str | None, base: RunConfig) -> StopSignal:
    from pydantic import TypeAdapter, ValidationError

    from tinsmith.rl.ending.duration import Duration
    from tinsmith.rl.ending.stop import StopSignal

    try:
        seconds = TypeAdapter(Duration).validate_python(time_limit) if time_limit is not None else None
    except ValidationError as error:
        raise ConfigError(f"--time-limit: {error.errors()[0]['msg']}", "Example: --time-limit 5h50m") from error
    return StopSignal(seconds, base.grace_period)


def _halving(members: Sequence[Member], rules: Rules) -> Halving:
    from tinsmith.rl.run.open import prepare
    from tinsmith.rl.sweep.control import Halving
    from tinsmith.rl.sweep.halving import steps_of_halving

    if any(member.config.stages for member in members):
        raise ConfigError("--halve: runs in stages have no common count of steps.", "Sweep the stage by itself.")
    prepared = [prepare(member.config)[0] for member in members]
    every = {config.eval.every if rules.metric.startswith("eval/") else 1 for config in prepared}
    if len(every) > 1:
        raise ConfigError("--halve: eval.every differs between the runs.", "Give all runs one eval.every.")
    settings = {member.combination.setting for member in members}
    steps = steps_of_halving(len(settings), rules.share, min(config.steps for config in prepared), every.pop())
    return Halving(metric=rules.metric, share=rules.share, steps=tuple(steps), lower=rules.lower)


def _starter(
    stack: ExitStack,
    file: Path,
    folder: SweepFolder,
    members: Sequence[Member],
    base: RunConfig,
    servers: Sequence[str],
) -> Callable[[Member, RunRecord], Child]:
    """What starts the process of a run, after the service of the sweep, if it has its own."""
    from tinsmith.runner import api_key, server, starts_service

    if len({member.config.model.name for member in members}) > 1 and not servers and starts_service(base):
        raise ConfigError(
            "model.name: the service of a sweep serves one base model.",
            "Start tinsmith serve with --model for each, and name it with --server.",
        )
    keys = {url: api_key(url, base.model.api_key_env) for url in servers}
    start_process = _process_starter(stack)  # it imports while the service loads its model
    own = None if servers else stack.enter_context(server(base))

    def start(member: Member, record: RunRecord) -> Child:
        words = [str(file), *member.combination.overrides]
        words += [f"folder={folder.run(member.name)}", f"name={member.config.name}"]
        words += [f"model.base_url={record.server}"] if own is None else []
        url, key = own or (record.server, keys[record.server])
        environment = {"TINKER_BASE_URL": url, base.model.api_key_env: key}
        with folder.log(member.name).open("ab") as log:
            return start_process("run", *words, environment=environment, log=log.fileno())

    return start


def _process_starter(stack: ExitStack) -> Callable[..., Child]:
    """What starts the process of a run from its words, environment and log."""
    from tinsmith.processes.forks import ForkServer
    from tinsmith.processes.start import start_child

    if sys.platform != "linux":
        return partial(start_child, "tinsmith.cli.sweep")
    forks = ForkServer("tinsmith.cli.sweep:preload")
    stack.callback(forks.close)
    return partial(forks.start, "tinsmith.cli.sweep:main")


def _write_best(folder: SweepFolder, base: RunConfig, best: Member) -> None:
    """Write the run file of the best run, under a name and in a folder of its own."""
    from tinsmith.atomic import atomic_write
    from tinsmith.rl.sweep.combinations import is_seed

    settings = best.config.model_copy(update={"name": f"{base.name}-best", "folder": ""})
    seeds = ", ".join(f"{key}={text}" for key, text in best.combination.values.items() if is_seed(key))
    note = f"# The best run of the sweep in {folder.path}: {best.name}\n"
    note += f"# Another seed than {seeds} shows what it does by itself.\n" if seeds else ""
    atomic_write(folder.best, (note + as_run_file(settings)).encode())


def _exit(stop: StopSignal, base: RunConfig, statuses: Sequence[str], refused: bool) -> None:
    """Raise StoppedEarly if runs are left, and TinsmithError if all others failed."""
    from tinsmith.cli.runner import StoppedEarly

    failed, left = statuses.count("failed"), statuses.count("waiting") + statuses.count("stopped")
    if left:
        why = f"stopped by {stop.reason}" if stop.reason else "stopped by the time limit of its runs"
        raise StoppedEarly(
            f"{base.name}: {why}, with {counted(left, 'run')} to go on",
            "The same command continues the sweep.",
            by_user=stop.by_user,
        )
    if failed:
        again = "The same command starts these runs again"
        raise TinsmithError(
            f"{failed} of {counted(len(statuses), 'run')} failed.",
            f"{again} once the cause above is mended. For other settings in a sweep that has begun, set --out to "
            "another folder."
            if refused
            else f"{again}.",
        )


def preload() -> None:
    """Import what a run needs, before its process is forked."""
    import httpcore  # noqa: F401 - httpx imports it with the first client
    import numpy

    import tinsmith.cli.runner  # noqa: F401
    from tinsmith.dialects import dialects
    from tinsmith.runner import import_trainer

    dialects()
    import_trainer()
    os.register_at_fork(after_in_child=numpy.random.seed)  # as in a process that was not forked


def main() -> None:
    """Entry point of the process of a run, which is killed with its sweep: the next one resumes it at once."""
    from tinsmith.cli import main as run_command
    from tinsmith.processes.parent import watch_parent

    watch_parent(partial(os.kill, os.getpid(), signal.SIGKILL), descriptor=0)
    run_command()


if __name__ == "__main__":
    main()
