"""The command `tinsmith serve`. Its options are settings of `ServeConfig`, with their types, help and defaults."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.memory_plan import GB, Gpu, MemoryPlan
from tinsmith.engine_options import Device, Dtype, Recompute, Sampler, Sharing, VllmConfig
from tinsmith.errors import ConfigError
from tinsmith.extras import require_torch
from tinsmith.overrides import COMMAND_LINE
from tinsmith.service.config import ServeConfig
from tinsmith.settings import Settings, build, read_values

Overrides = Annotated[
    str,
    Parameter(help="Further settings, such as cache_tokens=65536: docs/serve/service.md.", allow_leading_hyphen=False),
]


def option(name: str, settings: type[Settings] = ServeConfig, **options: Any) -> Parameter:
    """The option for a setting, with the setting's help and default."""
    field = settings.model_fields[name]
    default = field.get_default(call_default_factory=True)
    text = ", ".join(default) if isinstance(default, tuple) else str(default)
    shown = False if default is None else lambda _: text.replace(str(Path.home()), "~")
    return Parameter(help=" ".join((field.description or "").split()), show_default=shown, **options)


def serve(
    *overrides: Overrides,
    config: Annotated[Path | None, Parameter(help="YAML or TOML file of settings; options override it.")] = None,
    model: Annotated[tuple[str, ...] | None, option("models", negative="", consume_multiple=False)] = None,
    host: Annotated[str | None, option("host")] = None,
    port: Annotated[int | None, option("port")] = None,
    data: Annotated[Path | None, option("data")] = None,
    database: Annotated[str | None, option("database")] = None,
    api_key: Annotated[str | None, option("api_key")] = None,
    dtype: Annotated[Dtype | None, option("dtype")] = None,
    device: Annotated[Device | None, option("device")] = None,
    sampler: Annotated[Sampler | None, option("sampler")] = None,
    vllm_python: Annotated[Path | None, option("python", VllmConfig)] = None,
    threads: Annotated[int | None, option("threads")] = None,
    cluster: Annotated[str | None, option("address", ClusterConfig)] = None,
    trainers: Annotated[int | None, option("trainers", ClusterConfig)] = None,
    shard: Annotated[bool | None, option("shard", ClusterConfig, negative="")] = None,
    samplers: Annotated[int | None, option("samplers", ClusterConfig)] = None,
    sampler_gpus: Annotated[int | None, option("sampler_gpus", ClusterConfig)] = None,
    store: Annotated[str | None, option("store")] = None,
    deterministic: Annotated[bool | None, option("deterministic", negative="")] = None,
    sharing: Annotated[Sharing | None, option("sharing")] = None,
    recompute: Annotated[Recompute | None, option("recompute")] = None,
    log_format: Annotated[Literal["text", "json"] | None, option("log_format")] = None,
    plan: Annotated[bool, Parameter(help="Print how the memory of the GPU is divided, and exit.", negative="")] = False,
    card: Annotated[
        str | None, Parameter(help="With --plan: memory of the GPU, such as 80GB. Default: this machine's GPU.")
    ] = None,
) -> None:
    """Serve the Tinker API on this machine until interrupted."""
    from tinsmith.service.server import serve as serve_until_signal

    options = {
        "models": model, "host": host, "port": port, "data": data, "database": database,
        "store": store, "api_key": api_key, "deterministic": deterministic,
        "dtype": dtype, "device": device, "threads": threads, "sharing": sharing, "sampler": sampler,
        "recompute": recompute, "log_format": log_format,
    }  # fmt: skip
    nested = {
        "vllm.python": vllm_python, "cluster.address": cluster, "cluster.trainers": trainers, "cluster.shard": shard,
        "cluster.samplers": samplers, "cluster.sampler_gpus": sampler_gpus,
    }  # fmt: skip
    overrides += tuple(f"{name}={value}" for name, value in nested.items() if value is not None)
    settings = read_service_settings(config, overrides, options)
    if card is not None and not plan:
        raise ConfigError("--card is not used without --plan.", "Add --plan, or leave it out.")
    if plan:
        _print_plan(settings, card)
        return
    serve_until_signal(settings, on_ready=_print_key if settings.makes_key else None)


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
