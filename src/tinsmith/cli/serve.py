"""The command `tinsmith serve`. Its options are settings of `ServeConfig`, with their types, help and defaults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine_options import Device, Dtype, Recompute, Sampler, Sharing, VllmConfig
from tinsmith.overrides import COMMAND_LINE
from tinsmith.service.config import ServeConfig
from tinsmith.settings import Settings, build, read_values

Overrides = Annotated[
    str,
    Parameter(help="Further settings, such as cache_tokens=65536: docs/guides/service.md.", allow_leading_hyphen=False),
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
    frontends: Annotated[int | None, option("frontends")] = None,
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
) -> None:
    """Serve the Tinker API on this machine until interrupted."""
    from tinsmith.service.server import serve as serve_until_signal

    options = {
        "models": model, "host": host, "port": port, "frontends": frontends, "data": data, "database": database,
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
    serve_until_signal(settings, on_ready=_print_key if settings.makes_key else None)


def read_service_settings(config: Path | None, overrides: tuple[str, ...], options: dict[str, Any]) -> ServeConfig:
    """The settings of the file, with overrides and then options applied; an option of None is not given."""
    values = {name: value for name, value in options.items() if value is not None}
    place = str(config) if config else COMMAND_LINE
    return build(ServeConfig, {**read_values(ServeConfig, config, overrides), **values}, place, overrides)


def _print_key(_url: str, key: str) -> None:
    """Print the key to whoever starts the server; the log, which others may read, never contains a key."""
    sys.stdout.write(f"TINKER_API_KEY={key}\n")
    sys.stdout.flush()
