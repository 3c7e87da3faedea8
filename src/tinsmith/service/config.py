"""The settings of `tinsmith serve`: a frozen record, from options or from a YAML or TOML file.

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
"""The SDK refuses to send any other key."""


class ServeConfig(EngineOptions):
    """A service on one machine."""

    models: tuple[str, ...] = (DEFAULT_MODEL,)
    """Base models as NAME or NAME=SOURCE; names with one source share one set of weights."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    data: Path = Path.home() / ".tinsmith"
    """Folder of the database, the checkpoints and the key."""

    database: str | None = None
    """postgresql+psycopg://USER:PASSWORD@HOST/NAME; without it the database is a SQLite file in the data folder."""

    api_key: str | None = None
    """The server's own key, tml-…; without it, on loopback, one is made and kept in the data folder."""

    tokens: bool = True
    """Clients exchange their key for a token of 4 hours at each start, which `tinker auth whoami` reads."""

    public_url: str | None = None
    """Base URL of download links, for servers that a proxy hides. By default the URL of the client's request."""

    engine: Literal["torch", "fake"] = "torch"
    """`fake` answers in arithmetic instead of a model, so nothing about tensors matters to it: for tests and for trying
    the API."""

    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of waiting forward_backward requests that are handed to an engine together."""

    capture_every: int = Field(default=10, ge=1)
    """Optimizer steps after which a model's state is written down, so that a restart replays no more than these."""

    compress: bool | None = None
    """Clients send forward_backward bodies zstd-compressed; by default where a network lies between (no loopback)."""

    custom_losses: bool = False
    """Run losses that clients upload (create_custom_loss), from a list of allowed tensor operations."""

    hold_s: float = Field(default=25.0, gt=0, lt=45)
    """How long a poll for a result is held open; the client gives up at 45 s."""

    queued_samples: int = 20_000
    """Sampling requests that may wait or run at once; more are refused with 429."""

    session_timeout_s: float = 6 * 3600.0
    """Silence after which a session, its models and its sampling sessions end."""

    retention_s: float = 3600.0
    """How long a finished result can still be fetched."""

    log_format: Literal["text", "json"] = "text"
    """Of the log on standard error: text for people, json for programs."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """debug has a line for each finished request, info for each that failed or was refused."""

    otlp_endpoint: str | None = None
    """Where an OpenTelemetry collector takes spans over HTTP, as http://127.0.0.1:4318; without it none are made."""

    @field_validator("database")
    @classmethod
    def _database_is_known(cls, database: str | None) -> str | None:
        if database is not None and not database.startswith("postgresql+psycopg://"):
            raise ValueError("give postgresql+psycopg://USER:PASSWORD@HOST/NAME, or leave it out for SQLite")
        return database

    @field_validator("models", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, models: Any) -> Any:
        return (models,) if isinstance(models, str) else models

    @field_validator("models")
    @classmethod
    def _names_are_distinct(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        names = [entry.partition("=")[0] for entry in models]
        if not names or not all(names) or any(entry.endswith("=") for entry in models):
            raise ValueError("give at least one NAME or NAME=SOURCE")
        if len(set(names)) != len(names):
            raise ValueError("each NAME may be given once")
        return models

    @model_validator(mode="after")
    def _key_is_sane(self) -> ServeConfig:
        if self.api_key is not None and not self.api_key.startswith(KEY_PREFIX):
            raise ValueError(f"api_key must start with {KEY_PREFIX}, the SDK sends no other")
        return self

    @model_validator(mode="after")
    def _sampler_is_there(self) -> ServeConfig:
        if self.sampler == "torch" and self.vllm != VllmConfig():
            raise ValueError("settings of vllm are read with sampler=vllm alone: give both or none")
        if self.sampler == "vllm" and self.engine == "fake":
            raise ValueError("sampler=vllm samples for engine=torch alone")
        return self

    @property
    def is_loopback(self) -> bool:
        """Only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def key_file(self) -> Path:
        """Where a key is kept that was made for this machine."""
        return self.data / "api-key"

    @property
    def makes_key(self) -> bool:
        """A key will be made: none was given, none is kept, and nobody else can connect."""
        return self.api_key is None and self.is_loopback and not self.key_file.is_file()

    def sources(self) -> dict[str, list[str]]:
        """source -> the names it is served under, in the order given."""
        grouped: dict[str, list[str]] = {}
        for entry in self.models:
            name, _, source = entry.partition("=")
            grouped.setdefault(source or name, []).append(name)
        return grouped

    def engine_config(self, source: str) -> EngineConfig:
        """What the engine of one source is made from."""
        options = {name: self.__dict__[name] for name in EngineOptions.model_fields}
        return EngineConfig(source=source, kind=self.engine, **options)
