"""The command `tinsmith serve`. Its options are settings of `ServeConfig`, with their types, help and defaults."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from cyclopts import Parameter

from tinsmith.engine.memory_plan import GB, Gpu, MemoryPlan
from tinsmith.errors import ConfigError
from tinsmith.imports import require_torch
from tinsmith.overrides import COMMAND_LINE
from tinsmith.processes import garbage_collection
from tinsmith.service.config import ServeConfig
from tinsmith.settings import Settings, build, field_docs, read_values

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tinsmith.service.service import Service

Overrides = Annotated[
    str,
    Parameter(help="Further settings, such as cache_tokens=65536: docs/serve/service.md.", allow_leading_hyphen=False),
]


SETTINGS = (
    "models", "host", "port", "data", "database", "api_key", "dtype", "device", "sampler", "vllm.python", "threads",
    "cluster.address", "cluster.trainers", "cluster.shard", "cluster.samplers", "cluster.sampler_gpus", "store",
    "deterministic", "sharing", "recompute", "log_format",
)  # fmt: skip
"""Settings that have an option, in the order of --help."""
_NAMES = {"models": "model", "vllm.python": "vllm_python", "cluster.address": "cluster"}
OPTIONS = {_NAMES.get(path, path.rpartition(".")[2]): path for path in SETTINGS}
"""Options and their settings. An option has the last part of its setting's name unless _NAMES has another."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the OPTIONS as keyword arguments after `config`, None where an option is not given."""
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    number = 1 + [each.name for each in own].index("config")
    options = [_option(name, path.split(".")) for name, path in OPTIONS.items()]
    vars(command)["__signature__"] = signature.replace(parameters=[*own[:number], *options, *own[number:]])
    return command


def _option(name: str, path: Sequence[str]) -> inspect.Parameter:
    """The option for a setting, with the setting's type, help and default."""
    kind: type[Settings] = ServeConfig
    for part in path[:-1]:
        kind = type(kind.model_fields[part].get_default(call_default_factory=True))
    field = kind.model_fields[path[-1]]
    default = field.get_default(call_default_factory=True)
    text = ", ".join(default) if isinstance(default, tuple) else str(default)
    shown = False if default is None else lambda _: text.replace(str(Path.home()), "~")
    text_of_help = " ".join(field_docs(kind)[path[-1]].split())
    about = Parameter(help=text_of_help, show_default=shown, negative="", consume_multiple=False)
    annotation = Annotated[Optional[field.annotation], about]  # type: ignore[valid-type]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@with_options
def serve(
    *overrides: Overrides,
    config: Annotated[Path | None, Parameter(help="YAML or TOML file of settings; options override it.")] = None,
    plan: Annotated[bool, Parameter(help="Print how the memory of the GPU is divided, and exit.", negative="")] = False,
    card: Annotated[
        str | None, Parameter(help="With --plan: memory of the GPU, such as 80GB. Default: this machine's GPU.")
    ] = None,
    dashboard: Annotated[bool, Parameter(help="Show the service and runs as web pages at /dashboard.")] = True,
    runs: Annotated[
        Path | None, Parameter(help="Folder of runs that the dashboard shows.", show_default=lambda _: "runs")
    ] = None,
    **options: Any,
) -> None:
    """Serve the Tinker API on this machine until interrupted."""
    with garbage_collection.paused():
        from tinsmith.service.server import serve as serve_until_signal

    values = {OPTIONS[name]: value for name, value in options.items() if value is not None}
    nested = tuple(f"{path}={value}" for path, value in values.items() if "." in path)
    top = {path: value for path, value in values.items() if "." not in path}
    settings = read_service_settings(config, (*overrides, *nested), top)
    if card is not None and not plan:
        raise ConfigError("--card is not used without --plan.", "Add --plan, or leave it out.")
    if runs is not None and not dashboard:
        raise ConfigError("--runs is not used with --no-dashboard.", "Leave one of them out.")
    if plan:
        _print_plan(settings, card)
        return
    pages = partial(mounted_dashboard, runs or Path("runs")) if dashboard else None
    serve_until_signal(settings, on_ready=_print_key if settings.makes_key else None, dashboard=pages)


def mounted_dashboard(runs: Path, service: Service, api: ASGIApp) -> ASGIApp:
    """The pages about a service. They need an admin key, but for a service of this machine that has no tenants."""
    from httpx import ASGITransport

    from tinsmith.dashboard.access import Access, Logins, is_loopback
    from tinsmith.dashboard.app import Sources, create_app
    from tinsmith.dashboard.service_state import ServiceClient

    address = f"http://{service.config.host}:{service.config.port}"
    client = ServiceClient(address, service.key or "", ASGITransport(api))
    is_local = is_loopback(service.config.host)
    access = Access(
        accepts=client.accepts,
        logins=Logins(),
        is_open=lambda: is_local and not service.tenants.has_keys,
        missing="",
        explanation="An admin key of the service: its own, or one made with tinsmith keys create NAME --admin.",
    )
    return create_app(Sources(folders=[runs], service=client), access)


def read_service_settings(config: Path | None, overrides: tuple[str, ...], options: dict[str, Any]) -> ServeConfig:
    """The settings of the file, with overrides and then options applied; an option of None is not given."""
    values = {name: value for name, value in options.items() if value is not None}
    place = str(config) if config else COMMAND_LINE
    return build(ServeConfig, {**read_values(ServeConfig, config, overrides), **values}, place, overrides)


def memory_plans(settings: ServeConfig, card: Gpu) -> Iterator[MemoryPlan]:
    """The plan of each kind of process on a GPU, from the models' configs alone. Raises ConfigError, with the numbers,
    for what does not fit."""
    if settings.engine == "fake":
        raise ConfigError("There is no memory to plan with engine: fake.", "Use engine: torch.")
    require_torch("A plan of a GPU's memory")
    import torch

    from tinsmith.engine import autotune, model_facts

    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    for source in settings.sources():
        config = settings.engine_config(source)
        made = autotune.planned(config, card, model_facts.read_facts(config, dtype, config_only=True))
        is_one = settings.cluster.is_single or (settings.cluster.trainers == 1 and made.sampler is None)
        yield made if is_one else replace(made, role="each training process")
        if made.sampler is not None:
            yield made.sampler


def plan_table(plan: MemoryPlan) -> Iterator[str]:
    """A plan as lines of text."""
    place = f"{plan.gpu.name}, {plan.role}" if plan.role else plan.gpu.name
    yield f"{plan.facts.source} on {place}: {plan.available / GB:.1f} GB of {plan.gpu.total_bytes / GB:.1f} GB"
    for part, size, enough in plan.lines():
        yield f"  {part:<18} {size / GB:7.2f} GB  {enough}".rstrip()
    in_turns = plan.vllm is not None and plan.vllm.asleep is not None
    yield f"  {'sum':<18} {plan.total / GB:7.2f} GB{'  of what is in memory at a time' if in_turns else ''}"


def _print_plan(settings: ServeConfig, card: str | None) -> None:
    require_torch("A plan of a GPU's memory")
    from tinsmith.engine.model_facts import gpu_here

    for plan in memory_plans(settings, gpu_here() if card is None else _named_card(card)):
        sys.stdout.write("\n".join((*plan_table(plan), "")))


def _named_card(text: str) -> Gpu:
    """A GPU of so much memory, all of it free."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * (2**30 if match[2].lower() == "gib" else GB)) if match else 0
    if not size:
        raise ConfigError(f"--card {text}: not a size of memory.", "Give one such as 80GB or 24GiB.")
    return Gpu(name=f"a GPU of {text.strip()}", total_bytes=size, free_bytes=size)


def _print_key(_url: str, key: str) -> None:
    """Print the key to whoever starts the server; the log, which others may read, never contains a key."""
    sys.stdout.write(f"TINKER_API_KEY={key}\n")
    sys.stdout.flush()
