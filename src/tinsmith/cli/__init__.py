"""The command `tinsmith`. Commands read settings, call the service or the harness, and print errors as sentences.

Commands import what they need when they run, so that --help is fast and `tinsmith serve` does not load the harness.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from tinsmith.cli.documents.output import AsJson, messages_on_stderr, print_json
from tinsmith.cli.documents.run import document_of
from tinsmith.cli.run_file import (
    RUN_FILES,
    Config,
    FileAndOverrides,
    PluginDir,
    TimeLimit,
    file_and_overrides,
    print_notes,
    with_plugins,
    with_time_limit,
)
from tinsmith.cli.runner import StoppedEarly
from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.plurals import counted
from tinsmith.terminal import REFUSED, STOPPED_EARLY, TRAINED_NOTHING, new_console

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.diagnosis import Diagnosis
    from tinsmith.rl.run.state import State

app = App(
    name="tinsmith",
    help="RL post-training of language models on the Tinker API: the service and the training harness. "
    "Start with tinsmith demo, or with tinsmith serve and any Tinker client.",
    help_epilogue="--debug with any command prints the traceback of an error.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)

app.command("tinsmith.cli.serve:serve", name="serve", help="Serve the Tinker API on this machine until interrupted.")
app.command("tinsmith.cli.dashboard:dashboard", name="dashboard", help="Show runs and a service as web pages.")
app.command(
    "tinsmith.cli.service.keys:app", name="keys", help="API keys of tenants: create, list, revoke, and set quotas."
)
app.command(
    "tinsmith.cli.service.admin:app", name="admin", help="Sessions, queues and use of a server, for all tenants."
)
app.command(
    "tinsmith.cli.service.admin:status", name="status", help="Processes of a running server: places, loads, versions."
)
app.command(
    "tinsmith.cli.service.backup:backup", name="backup", help="Back up a service, while its server runs or not."
)
app.command("tinsmith.cli.service.backup:restore", name="restore", help="Restore a backup into an empty data folder.")
app.command(
    "tinsmith.cli.service.backup:verify", name="verify", help="Check a data folder or a backup for what is missing."
)
app.command(
    "tinsmith.cli.service.transfer:import_adapter", name="import", help="Import a PEFT adapter as a checkpoint."
)
app.command(
    "tinsmith.cli.service.transfer:export", name="export", help="Export a checkpoint of a run as an adapter or a model."
)
app.command("tinsmith.cli.machine:models", name="models", help="List served and downloaded base models, or fetch one.")
app.command("tinsmith.cli.check:check", name="check", help="Check a run file and its data without starting anything.")
app.command("tinsmith.cli.sweep:sweep", name="sweep", help="Train a run file with several values of some settings.")
app.command("tinsmith.cli.chat.command:chat", name="chat", help="Talk to a model, a run or a checkpoint.")
app.command(
    "tinsmith.cli.eval.command:evaluate",
    name="eval",
    help="Evaluate a model, a run or a checkpoint on benchmarks or tasks.",
)
app.command("tinsmith.cli.run_file:config", name="config", help="Show a run file with all settings, or convert one.")
app.command("tinsmith.cli.data:app", name="data", help="Prepare datasets as JSONL files for run files.")
app.command("tinsmith.cli.show:show", name="show", help="Show a run, its rollouts, or one of them whole.")
app.command("tinsmith.cli.log:log", name="log", help="Show the log of a run.")
app.command("tinsmith.cli.prove:prove", name="prove", help="Prove on this machine that the service is exact.")
app.command("tinsmith.cli.machine:doctor", name="doctor", help="Check this machine for everything the service needs.")
app.register_install_completion_command(help="Install the completion of commands and options for your shell.")

_TAKE_SETTINGS = ("run", "check", "debug", "config", "demo", "sweep")
"""Commands whose words may set keys of a run file."""

Overrides = Annotated[
    str, Parameter(help="Settings that override the defaults, such as steps=20.", allow_leading_hyphen=False)
]


@app.command(synonym="train")
def run(
    *words: FileAndOverrides,
    config: Config = None,
    plugin_dir: PluginDir = None,
    time_limit: TimeLimit = None,
    as_json: AsJson = False,
) -> None:
    """Train from a run file, or resume the run in its folder. Reads files of Trinity-RFT, rLLM and minds_RL too.

    mode=explore only samples and mode=train only trains: two processes of one run. mode=bench compares checkpoints.

    The server is model.base_url of the file, else TINKER_BASE_URL; the key is TINKER_API_KEY or TRINITY_API_KEY.

    Without either URL, a service runs on this machine for the duration of the run.

    With --json, the document is printed when the run ends or stops early; all messages go to standard error.
    """
    from tinsmith.cli.runner import in_fresh_folder
    from tinsmith.dialects import read_run

    file, overrides = file_and_overrides("run", words, config)
    console = new_console(stderr=as_json)
    with messages_on_stderr(as_json):
        run_file = read_run(file, with_time_limit(with_plugins(overrides, plugin_dir), time_limit))
        print_notes(run_file, console)
        settings = in_fresh_folder(run_file.settings)
    try:
        with messages_on_stderr(as_json):
            ended = _run(run_file.settings, settings, console)
    except StoppedEarly:
        if as_json:
            print_json(document_of(settings))
        raise
    if as_json:
        print_json(document_of(settings))
    if ended is not None:
        _end(*ended, console)


def _run(file: RunConfig, settings: RunConfig, console: Console) -> tuple[RunConfig, Diagnosis] | None:
    """Run to the end. Returns the settings and the diagnosis of the last stage; None of a run that does not train.

    `file`: the settings of the run file; those of the run may have another folder.
    """
    from tinsmith.cli.runner import diagnosis_of, sample, train

    if settings.mode in ("explore", "bench"):
        sample(file, settings, console)
        return None
    stage, state = train(settings, console)
    diagnosis = diagnosis_of(stage)
    if not diagnosis.trained_nothing:
        console.print(f"{_plain(stage.name)} is finished: {counted(state.step, 'step')}", highlight=False)
    _print_results(stage, state, console)
    return stage, diagnosis


@app.command
def debug(*words: FileAndOverrides, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Run one task of a run file once and show its messages, tokens, logprobs, reward and timing. Trains nothing."""
    import asyncio

    from tinsmith.cli.service.folder import temporary_folder
    from tinsmith.dialects import read_run
    from tinsmith.rl import debug as single_task
    from tinsmith.runner import connecting_to

    file, overrides = file_and_overrides("debug", words, config)
    console = new_console()
    run_file = read_run(file, with_plugins(overrides, plugin_dir))
    print_notes(run_file, console)
    with temporary_folder() as folder, ExitStack() as stack:
        settings = run_file.settings.model_copy(update={"folder": str(folder)})
        stage = settings.stage_config(1, "") if settings.stages else settings
        connect = connecting_to(settings, stack, console)(stage)
        single_task.show_rollout(asyncio.run(single_task.debug_rollout(stage, connect)), console)


@app.command
def demo(
    *overrides: Overrides,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Train a small model on this machine: two-digit addition, from 0 % to about 80 % correct.

    Parameters
    ----------
    quick
        Train on the largest of four numbers instead, in a third of the time.
    seed
        Seed of the run.
    out
        Folder of the run. Default: a new one under runs/.
    """
    from tinsmith.cli.runner import diagnosis_of, train
    from tinsmith.rl import demo as addition
    from tinsmith.rl.run.parts import folder_path

    console = new_console()
    settings = addition.settings(quick=quick, seed=seed, out=out, overrides=overrides)
    addition.introduce(settings, console)
    settings, state = train(settings, console, always_new_folder=out is None)
    addition.conclude(folder_path(settings), console)
    _print_results(settings, state, console)
    _end(settings, diagnosis_of(settings), console)


def main() -> None:
    """Run the command line and exit: 0 success, or stopped by Ctrl-C; 1 internal error, 2 user error, 3 no step updated
    the weights, 75 stopped early by a time limit or SIGTERM, 130 ended at once by Ctrl-C."""
    words = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(words) < len(sys.argv) - 1
    console = new_console(stderr=True, soft_wrap=True)
    try:
        app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _print_error(_usage_error(error, words), console)
        sys.exit(REFUSED)
    except TinsmithError as error:
        if debug:
            raise
        _print_error(error, console)
        sys.exit(REFUSED if isinstance(error, UserError) else 1)
    except StoppedEarly as stopped:
        console.print(". ".join(map(_plain, stopped.args)), highlight=False)
        sys.exit(0 if stopped.by_user else STOPPED_EARLY)
    except KeyboardInterrupt as interrupt:
        console.print("; ".join(["interrupted", *map(_plain, map(str, interrupt.args))]), highlight=False)
        sys.exit(130)


def _usage_error(error: CycloptsError, words: Sequence[str]) -> ConfigError:
    if isinstance(error, UnknownOptionError) and error.token is not None:
        return _option_error(error, error.token.keyword or error.token.value, words)
    if isinstance(error, UnknownCommandError):
        word = (error.unused_tokens or [""])[0]
        return ConfigError(str(error), _run_file_hint(error, word) or "--help lists the commands.")
    if not isinstance(error, UnusedCliTokensError):
        return ConfigError(str(error), "--help lists the options.")
    from tinsmith.settings import did_you_mean

    command, word = " ".join(("tinsmith", *(error.command_chain or ()))), (error.unused_tokens or [""])[0]
    names = [name for name in error.app or () if not name.startswith("-")]
    message = f"{command} does not take {word!r}. {did_you_mean(word, names)}".strip()
    commands = f"Its commands: {', '.join(names)}. " if names else ""
    return ConfigError(message, f"{commands}{command} --help says what it takes.")


def _command(error: CycloptsError) -> str:
    """The first word of the command that the error is of; empty if there is none."""
    return (error.command_chain or ("",))[0]


def _run_file_hint(error: UnknownCommandError, word: str) -> str:
    """The command for a run file that was given as one; empty for other words."""
    if not word.endswith(RUN_FILES):
        return ""
    if _command(error) == "config":
        return f"To print a run file with all its settings: tinsmith config show {word}"
    return f"To train from a run file: tinsmith run {word}"


def _option_error(error: CycloptsError, option: str, words: Sequence[str]) -> ConfigError:
    """The error for an unknown option, which may be a setting with hyphens before it."""
    name, equals, value = option.partition("=")
    at = next((at for at, word in enumerate(words) if word.partition("=")[0] == name), len(words))
    value = value if equals else next((word for word in words[at + 1 : at + 2] if not word.startswith("-")), "VALUE")
    key = name.lstrip("-").replace("-", "_")
    if _command(error) in _TAKE_SETTINGS:
        from tinsmith.rl.config import RunConfig

        hint = RunConfig.suggestion(key) or _setting_hint(key, value)
        return ConfigError(f"Unknown option: {option}.", f"{hint} --help lists the options.")
    if _command(error) == "serve":
        from tinsmith.service.config import ServeConfig
        from tinsmith.settings import nearest_name, paths

        nearest = nearest_name(key, paths(ServeConfig), cutoff=0.8)
        if nearest and f"--{nearest.replace('_', '-')}?" not in str(error):  # no option has this name
            return ConfigError(
                f"Unknown option: {option}.", f"{_setting_hint(nearest, value)} --help lists the options."
            )
    return ConfigError(str(error), "--help lists the options.")


def _setting_hint(key: str, value: str) -> str:
    return f"A setting has no hyphens before it: {key}={value}."


def _print_error(error: TinsmithError, console: Console) -> None:
    console.print(f"[bold red]error:[/] {_plain(error.message)}", highlight=False)
    if error.hint:
        console.print(f"[dim]{_plain(error.hint)}[/]", highlight=False)


def _print_results(settings: RunConfig, state: State, console: Console) -> None:
    """Print where the report, the metrics and the weights are, and how to serve them."""
    from tinsmith.rl.history import RunHistory, data_folder
    from tinsmith.rl.record import comparison
    from tinsmith.rl.record.layout import Layout
    from tinsmith.rl.run.parts import folder_path
    from tinsmith.runner import own_service, starts_service

    layout, service = Layout(folder_path(settings)), own_service(settings)
    comparison.print_tables(console, comparison.read(layout.path))
    places: list[tuple[str, Any]] = [("report", layout.report), ("metrics", layout.metrics)]
    places += [("weights", f"{state.sampling_path}{_of_best(settings, state)}"), ("resume from", state.path)]
    if starts_service(settings) and (data := data_folder(RunHistory(layout.path))):
        dry_run = " engine=fake" if service.engine == "fake" else ""
        places.append(("serve with", f"tinsmith serve --data {data} --model {service.models[0]}{dry_run}"))
    for name, place in places:
        console.print(f"[dim]{name:>11}[/]  {_plain(str(place))}", highlight=False, soft_wrap=True)


def _of_best(settings: RunConfig, state: State) -> str:
    """Which step the weights are of, where they are the best of the run."""
    metric = settings.checkpoint.metric
    return f"  (of step {state.best.step}, {metric} {state.best.value:.4g})" if state.best else ""


def _end(settings: RunConfig, diagnosis: Diagnosis, console: Console) -> None:
    """If no step updated the weights, say so and exit with TRAINED_NOTHING; a dry run exits with 0."""
    if diagnosis.trained_nothing:
        text = f"{settings.name} has learned nothing: {diagnosis.summary}"
        console.print(f"[bold red]{_plain(text)}[/]", highlight=False, soft_wrap=True)
        if settings.service.engine != "fake":
            sys.exit(TRAINED_NOTHING)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
