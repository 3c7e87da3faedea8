"""Settings of the service, from options of `tinsmith serve` or from a YAML or TOML file.

Example: ServeConfig(models=("HuggingFaceTB/SmolLM2-135M-Instruct",), port=8000, data=Path("served"))
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tinsmith.engine.config import DEFAULT_MODEL, EngineConfig
from tinsmith.engine_options import EngineOptions, VllmConfig

KEY_PREFIX = "tml-"
"""Prefix of every API key; the SDK rejects keys without it."""


class ServeConfig(EngineOptions):
    """Settings of one service."""

    models: tuple[str, ...] = (DEFAULT_MODEL,)
    """Base models to serve, each as NAME or NAME=SOURCE; a source is a Hub id, a folder or a GGUF file. May be given
    several times. Names with the same source share one set of weights."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""

    data: Path = Path.home() / ".tinsmith"
    """Data folder: database, checkpoints, journal and API key."""

    database: str | None = None
    """PostgreSQL URL, as postgresql+psycopg://USER:PASSWORD@HOST/NAME. Default: a SQLite file in the data folder."""

    api_key: str | None = None
    """The server's own API key, tml-…, with access to the data of all tenants. Default: on a loopback address, a key
    generated at the first start and stored in the data folder."""

    tokens: bool = True
    """Have clients exchange their API key for a 4-hour token at startup. `tinker auth whoami` needs it."""

    public_url: str | None = None
    """Base URL of download links, for a server that is reached through a proxy. Default: the URL of the request."""

    engine: Literal["torch", "fake"] = "torch"
    """`torch` runs the base models. `fake` computes results by simple arithmetic, without a model and without tensors,
    for tests and to try the API."""

    batch_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens of forward and forward_backward requests that an engine gets together. A larger request
    runs by itself."""

    capture_every: int = Field(default=10, ge=1)
    """Optimizer steps between two captures of a model's state. After a crash, the requests since the last capture are
    replayed."""

    compress: bool | None = None
    """Have clients compress forward_backward bodies with zstd. Default: yes, unless `host` is a loopback address."""

    custom_losses: bool = False
    """Accept losses that clients upload with create_custom_loss. They may use only allowed tensor operations."""

    hold_s: float = Field(default=25.0, gt=0, lt=45)
    """Seconds that a poll for a result waits for it. Must be below 45, when the SDK gives up."""

    queued_samples: int = 20_000
    """Maximum number of sampling requests that wait or run; further ones are refused with status 429."""

    session_timeout_s: float = 6 * 3600.0
    """Seconds without a request or a heartbeat after which a session ends, with its models and sampling sessions."""

    retention_s: float = 3600.0
    """Seconds that a finished result can be fetched."""

    log_format: Literal["text", "json"] = "text"
    """Format of the log on standard error: `text` for people, `json` for programs, one object per line."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Minimum level of log lines. `debug` logs every finished request, `info` failed and refused requests only."""

    otlp_endpoint: str | None = None
    """OpenTelemetry collector that receives request spans over HTTP, such as http://127.0.0.1:4318. Default: no
    spans."""

    @field_validator("database")
    @classmethod
    def _check_database(cls, database: str | None) -> str | None:
        if database is not None and not database.startswith("postgresql+psycopg://"):
            raise ValueError("give postgresql+psycopg://USER:PASSWORD@HOST/NAME, or leave it out for SQLite")
        return database

    @field_validator("models", mode="before")
    @classmethod
    def _wrap_single_name(cls, models: Any) -> Any:
        return (models,) if isinstance(models, str) else models

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        names = [entry.partition("=")[0] for entry in models]
        if not names or not all(names) or any(entry.endswith("=") for entry in models):
            raise ValueError("give at least one NAME or NAME=SOURCE")
        if len(set(names)) != len(names):
            raise ValueError("each NAME may be given once")
        return models

    @model_validator(mode="after")
    def _check_key(self) -> ServeConfig:
        if self.api_key is not None and not self.api_key.startswith(KEY_PREFIX):
            raise ValueError(f"api_key must start with {KEY_PREFIX}; the SDK sends no other key")
        return self

    @model_validator(mode="after")
    def _check_sampler(self) -> ServeConfig:
        if self.sampler == "torch" and self.vllm != VllmConfig():
            raise ValueError("settings of vllm are not used without sampler: vllm; set it, or leave them out")
        if self.sampler == "vllm" and self.engine == "fake":
            raise ValueError("sampler: vllm needs engine: torch")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether `host` is a loopback address, which only this machine can reach."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def key_file(self) -> Path:
        """File of the generated API key."""
        return self.data / "api-key"

    @property
    def makes_key(self) -> bool:
        """Whether the start generates an API key: none is set or stored, and `host` is a loopback address."""
        return self.api_key is None and self.is_loopback and not self.key_file.is_file()

    def sources(self) -> dict[str, list[str]]:
        """Map each source to the names that it is served under, in the order of `models`."""
        grouped: dict[str, list[str]] = {}
        for entry in self.models:
            name, _, source = entry.partition("=")
            grouped.setdefault(source or name, []).append(name)
        return grouped

    def engine_config(self, source: str) -> EngineConfig:
        """Settings of the engine of one source."""
        options = {name: self.__dict__[name] for name in EngineOptions.model_fields}
        return EngineConfig(source=source, kind=self.engine, **options)
