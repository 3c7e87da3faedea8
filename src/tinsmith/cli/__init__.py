"""The command `tinsmith`: thin. It reads settings, puts the two wings together and prints errors as sentences.

Imports stand inside the commands, so that --help is quick and serving needs nothing of the harness.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from tinsmith.cli.run_file import Config, PluginDir, Words, parse_words, tell, with_plugins
from tinsmith.errors import ConfigError, TinsmithError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.run_folder import State
    from tinsmith.service.config import ServeConfig

app = App(
    name="tinsmith",
    help="RL post-training of language models on the Tinker API: the service, and the harness.",
    help_epilogue="--debug with any command shows the traceback of an error.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)

app.command("tinsmith.cli.keys:app", name="keys", help="Keys of tenants: make, list, revoke, and limit a tenant.")
app.command("tinsmith.cli.machine:models", name="models", help="Base models: what is served, what is here; fetch more.")
app.command("tinsmith.cli.run_file:check", name="check", help="Look at a run file without starting anything.")
app.command("tinsmith.cli.run_file:config", name="config", help="Run files as they are read: show one, convert one.")
app.command("tinsmith.cli.log:log", name="log", help="Show the log of a run.")
app.command("tinsmith.cli.machine:doctor", name="doctor", help="Look at this machine: has it what a service needs?")

Overrides = Annotated[
    str, Parameter(help="Settings laid on top, as steps=20 or model.rank=8.", allow_leading_hyphen=False)
]
ServiceSettings = Annotated[
    str,
    Parameter(help="Settings laid on top, as cache_tokens=65536: docs/guides/service.md.", allow_leading_hyphen=False),
]
Recompute = Annotated[
    Literal["auto", "always", "never"],
    Parameter(help="Activations again in the backward: more work, less memory; auto does so for very long rows."),
]


@app.command
def serve(
    *overrides: ServiceSettings,
    config: Path | None = None,
    model: Annotated[tuple[str, ...] | None, Parameter(negative="", consume_multiple=False)] = None,
    host: str | None = None,
    port: int | None = None,
    data: Path | None = None,
    database: str | None = None,
    api_key: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    sampler: Literal["torch", "vllm"] | None = None,
    vllm_python: Annotated[Path | None, Parameter(help="Of vLLM's venv; .venv-vllm/bin/python if not given.")] = None,
    threads: int | None = None,
    sharing: Literal["latency", "throughput"] | None = None,
    recompute: Recompute | None = None,
    log_format: Literal["text", "json"] | None = None,
) -> None:
    """Serve the Tinker API on this machine until interrupted.

    Parameters
    ----------
    config
        A YAML or TOML file of settings; options here lie on top of it.
    model
        NAME or NAME=SOURCE, repeatable: a hub id, a folder or a GGUF file; SmolLM2-135M-Instruct if not given.
    host
        Address to listen on; 127.0.0.1 if not given.
    port
        Port to listen on; 8000 if not given, 0 for a free one.
    data
        Folder of the database, the checkpoints and the key; ~/.tinsmith if not given.
    database
        postgresql+psycopg://USER:PASSWORD@HOST/NAME; without it a SQLite file in the data folder.
    api_key
        The server's own key, tml-…; without it, on loopback, one is made and kept there. More: tinsmith keys.
    dtype
        Of the base models; auto is bfloat16 on GPUs and CPUs that are fast at it (AVX512-BF16, AMX), else float32.
    device
        auto is a GPU if there is one.
    sampler
        Who samples: torch is this engine, with the weights it trains; vllm is a vLLM beside it (docs/guides/vllm.md).
    threads
        CPU threads for tensor work; 0 is one for each core.
    sharing
        How training and sampling take turns on a device: few waits for a token, or most tokens of both together.
    log_format
        Of the log on standard error: text for people, json for programs.
    """
    from tinsmith.service.server import serve as serve_until_signal

    options = {
        "models": model, "host": host, "port": port, "data": data, "database": database, "api_key": api_key,
        "dtype": dtype, "device": device, "threads": threads, "sharing": sharing, "sampler": sampler,
        "recompute": recompute, "log_format": log_format,
    }  # fmt: skip
    overrides = (*overrides, f"vllm.python={vllm_python}") if vllm_python else overrides
    settings = _serve_settings(config, overrides, options)
    serve_until_signal(settings, on_ready=_show_key if settings.makes_key else None)


@app.command
def run(*words: Words, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Train as a run file says, or go on with the run that its folder holds. Files of Trinity-RFT run as they are.

    mode=explore samples only, and mode=train trains only, as two processes of one run; mode=bench compares checkpoints.

    The server is the file's model.base_url, else TINKER_BASE_URL, with the key in TINKER_API_KEY or TRINITY_API_KEY.

    Without either, a service is started on this machine for as long as the run takes.
    """
    from rich.console import Console

    from tinsmith.cli.runner import sample, train
    from tinsmith.dialects import read_run

    file, overrides = parse_words("run", words, config)
    console = Console()
    found = read_run(file, with_plugins(overrides, plugin_dir))
    tell(found, console)
    if found.settings.mode in ("explore", "bench"):
        sample(found.settings, console)
        return
    settings, state = train(found.settings, console)
    console.print(f"{_plain(settings.name)} is finished: {state.step} steps", highlight=False)
    _tell_where(settings, state, console)


@app.command
def debug(*words: Words, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Try one task of a run file once, and show everything of it: messages, tokens, logprobs, reward, times.

    Trains nothing.
    """
    import asyncio
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from tinsmith.cli.runner import connecting_to
    from tinsmith.dialects import read_run
    from tinsmith.rl import debug as look

    file, overrides = parse_words("debug", words, config)
    console = Console()
    found = read_run(file, with_plugins(overrides, plugin_dir))
    tell(found, console)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        settings = found.settings.model_copy(update={"folder": folder})
        first = settings.stage_config(1, "") if settings.stages else settings
        connect = connecting_to(settings, stack, console)(first)
        look.show_rollout(asyncio.run(look.debug_rollout(first, connect)), console)


@app.command
def demo(
    *overrides: Overrides,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Watch a small model learn on this machine: two-digit addition, from no right answer to most.

    Parameters
    ----------
    quick
        The largest of four numbers instead: a third of the time.
    seed
        Another seed is another run.
    out
        Folder of the run; a new one under runs/ if not given.
    """
    from rich.console import Console

    from tinsmith.cli.runner import train
    from tinsmith.rl import demo as built_in
    from tinsmith.rl.run import folder_path

    console = Console()
    settings = built_in.settings(quick=quick, seed=seed, out=out, overrides=overrides)
    built_in.introduce(settings, console)
    settings, state = train(settings, console, afresh=out is None)
    built_in.conclude(folder_path(settings), console)
    _tell_where(settings, state, console)


def main() -> None:
    """Runs the command line and exits: 0 done, 1 our fault, 2 the user can mend it, 130 interrupted."""
    words = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(words) < len(sys.argv) - 1
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    try:
        app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _tell(ConfigError(str(error), "--help shows what there is."), console)
        sys.exit(2)
    except TinsmithError as error:
        if debug:
            raise
        _tell(error, console)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt as stopped:
        console.print("; ".join(["interrupted", *map(_plain, map(str, stopped.args))]), highlight=False)
        sys.exit(130)


def _tell(error: TinsmithError, console: Console) -> None:
    console.print(f"[bold red]error:[/] {_plain(error.message)}", highlight=False)
    if error.hint:
        console.print(f"[dim]{_plain(error.hint)}[/]", highlight=False)


def _serve_settings(config: Path | None, overrides: tuple[str, ...], options: dict[str, Any]) -> ServeConfig:
    """The file's, with overrides and then options laid on top."""
    from tinsmith.service.config import ServeConfig
    from tinsmith.settings import COMMAND_LINE, build, read_values

    given = {name: value for name, value in options.items() if value is not None}
    place = str(config) if config else COMMAND_LINE
    return build(ServeConfig, {**read_values(config, overrides), **given}, place, overrides)


def _tell_where(settings: RunConfig, state: State, console: Console) -> None:
    from tinsmith.cli.runner import own_service
    from tinsmith.rl.run import folder_path

    folder, own = folder_path(settings), own_service(settings)
    places: list[tuple[str, Any]] = [("report", folder / "report.html"), ("metrics", folder / "metrics.jsonl")]
    places += [("weights", state.sampling_path), ("go on from", state.path)]
    if own.data.is_dir():
        places.append(("served by", f"tinsmith serve --data {own.data} --model {own.models[0]}"))
    for name, place in places:
        console.print(f"[dim]{name:>10}[/]  {_plain(str(place))}", highlight=False, soft_wrap=True)


def _show_key(_url: str, key: str) -> None:
    """Once, to whoever starts the server; its log, which others may read, never holds a key."""
    sys.stdout.write(f"TINKER_API_KEY={key}\n")
    sys.stdout.flush()


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
