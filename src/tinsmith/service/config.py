"""Settings of the service, from options of `tinsmith serve` or from a YAML or TOML file.

Example: ServeConfig(models=("HuggingFaceTB/SmolLM2-135M-Instruct",), port=8000, data=Path("served"))
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import DEFAULT_MODEL, EngineConfig
from tinsmith.engine_options import EngineOptions, VllmConfig
from tinsmith.errors import ConfigError
from tinsmith.settings import Needs, changed_keys

TORCH_SETTINGS = tuple(
    name for name in EngineOptions.model_fields if name not in ("sampler", "vllm", "cache_tokens", "engine_timeout_s")
)
"""Settings that are not used with `engine: fake`; vllm's have checks of their own."""
KEY_PREFIX = "tml-"
"""Prefix of every API key; the SDK rejects keys without it."""


SET_BY_SERVER = {"--model", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--root-path"}
"""Options of vLLM that say how the server reaches it."""


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

    store: str | None = None
    """URL of an object store for checkpoints, sampler versions and captured states, such as s3://BUCKET/PREFIX or
    file:///SHARED/FOLDER. The folders in `data` are a cache of it then. Default: the data folder alone."""

    store_cache: Annotated[int, Needs("store")] = Field(default=20 << 30, ge=0)
    """Bytes of the data folder for copies of what is in the store. The least recently used ones are deleted first."""

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

    check_model: Literal["once", "always"] = "once"
    """When an engine on a CPU compares its computations with transformers' own as it loads a base model: `always`, or
    `once` for the model's config, the settings, the versions and the processor. The results are in the folder of
    converted models ($TINSMITH_CACHE, ~/.cache/tinsmith). With `once`, the compiled gradients are checked before the
    first training pass if the load has ended before they are compiled."""

    cluster: Annotated[
        ClusterConfig,
        Needs("store", key="cache"),
        Needs("cluster.is_group", key="data_timeout_s", reason="with one training process", hint="leave it out"),
    ] = ClusterConfig()
    """Training and sampling processes of each base model, and their machines (docs/serve/cluster.md)."""

    batch_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens of a tenant's forward and forward_backward requests that an engine has at a time, beside
    one larger request. Tenants take turns by micro-batches, whatever this is."""

    capture_every: int = Field(default=10, ge=1)
    """Optimizer steps between two captures of a model's state. After a crash, the requests since the last capture are
    replayed."""

    compress: bool | None = None
    """Have clients compress forward_backward bodies with zstd. Default: yes, unless `host` is a loopback address."""

    shadows: int = Field(default=256, ge=0)
    """Maximum number of shadow models of a tenant (docs/research/shadow.md)."""

    shadow_bytes: int = Field(default=8 << 30, ge=0)
    """Memory that the shadow models of a tenant may take, each as after its first step."""

    custom_losses: bool = False
    """Accept losses that clients upload with create_custom_loss. They may use only allowed tensor operations."""

    hold_s: float = Field(default=25.0, gt=0, lt=45)
    """Seconds that a poll for a result waits for it. Must be below 45, when the SDK gives up."""

    queued_samples: int = 20_000
    """Maximum number of sampling requests that wait or run; further ones are refused with status 429."""

    sampling_sessions: int = Field(default=50_000, ge=1)
    """Maximum number of sampling sessions of one session; a run makes one each time it samples on new weights."""

    session_timeout_s: float = 6 * 3600.0
    """Seconds without a request or a heartbeat after which a session ends, with its models and sampling sessions."""

    connections_per_address: int = Field(default=512, ge=1)
    """Connections that one address may have open; further ones are refused with status 429. Connections from this
    machine, and with them those of a proxy on it, have no such limit."""

    request_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds within which the headers of a request must arrive. A body must arrive at 8 KiB/s on average over this
    time, and a client must read its response; otherwise its connection closes."""

    retention_s: float = 3600.0
    """Seconds that a result can be fetched again. A training result that was never fetched stays for a day at least,
    so that a client that sleeps loses nothing."""

    ended_retention_s: float = 30 * 86400.0
    """Seconds after its end that a session is listed, with its models and sampling sessions, and that audit entries and
    usage can be queried (usage for 14 days at least). Named checkpoints stay, with the records of their models."""

    model_memory: int | None = Field(default=None, ge=1)
    """Bytes of the models in training of one engine, 16 a parameter. Models that are not in use are evicted to disk to
    stay within it. Default: on a CPU half of the memory that is free once the base model is loaded, on a GPU what the
    memory plan leaves them (`tinsmith serve --plan`)."""

    idle_model_s: float = Field(default=900.0, gt=0)
    """Seconds without a request after which a model in training is evicted to disk; its next request restores it."""

    disk_reserve: int = Field(default=1 << 30, ge=0)
    """Free bytes of the data folder's disk below which saves, new sessions and uploads are refused."""

    sampler_versions: int = Field(default=4, ge=1)
    """Newest unnamed sampler versions of a model that stay on disk as long as their session lives."""

    max_sampler_versions: int = Field(default=16, ge=1)
    """Unnamed sampler versions of a model that stay on disk at most: of more, those that were not used for longest are
    deleted. Versions that were saved or sampled from in the last 10 minutes stay all the same."""

    version_retention_s: float = Field(default=6 * 3600.0, ge=0)
    """Seconds that older unnamed sampler versions stay after they were saved or last sampled from; while the disk is
    low, at most 10 minutes."""

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

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "")
        if url is not None and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query):
            raise ValueError("give a URL such as https://tinsmith.example.org")
        return url

    @model_validator(mode="after")
    def _check_engine(self) -> ServeConfig:
        unused = [name for name in changed_keys(self) if name in TORCH_SETTINGS]
        if self.engine == "fake" and unused:
            raise ValueError(f"{unused[0]} is not used with engine: fake; leave it out")
        return self

    @model_validator(mode="after")
    def _check_versions(self) -> ServeConfig:
        if self.sampler_versions > self.max_sampler_versions:
            raise ValueError(
                f"sampler_versions: {self.sampler_versions} is above max_sampler_versions: "
                f"{self.max_sampler_versions}; lower it, or raise max_sampler_versions"
            )
        return self

    @model_validator(mode="after")
    def _check_sampler(self) -> ServeConfig:
        if self.sampler == "torch" and self.vllm != VllmConfig():
            raise ValueError("settings of vllm are not used without sampler: vllm; set it, or leave them out")
        if self.sampler == "vllm" and self.engine == "fake":
            raise ValueError("sampler: vllm needs engine: torch")
        if self.sampler == "vllm" and self.deterministic:
            raise ValueError("deterministic needs sampler: torch; vLLM's results depend on what else it samples")
        if self.sampler == "vllm" and self.quantize != "none" and "--quantization" not in " ".join(self.vllm.args):
            raise ValueError(
                f"quantize: {self.quantize} is the trainer's; vLLM would sample from the weights as they are. "
                "Use sampler: torch, or give vLLM the same: vllm.args: [--quantization, bitsandbytes]"
            )
        if self.vllm.sleep is True and (self.vllm.devices or self.cluster.samplers or self.device == "cpu"):
            raise ValueError(
                "vllm.sleep: true is for a vLLM on the trainer's GPU; leave it out on a CPU, and with vllm.devices or "
                "cluster.samplers, which give vLLM GPUs of its own"
            )
        if any(arg.startswith("--data-parallel-size") for arg in self.vllm.args):
            raise ValueError("vllm.args: --data-parallel-size loads an adapter on one process only; use --samplers")
        for arg in self.vllm.args:
            if arg.partition("=")[0] in SET_BY_SERVER:
                raise ValueError(f"vllm.args: {arg} is for Tinsmith to set, which is vLLM's only client; leave it out")
        return self

    @model_validator(mode="after")
    def _check_cluster(self) -> ServeConfig:
        cluster = self.cluster
        if cluster.is_group and self.engine == "fake":
            raise ValueError("cluster.trainers and cluster.shards need engine: torch")
        try:
            cluster.shards_of_rows(deterministic=self.deterministic)
        except ConfigError as error:
            raise ValueError(str(error).removesuffix(".")) from error
        if not cluster.is_single and cluster.samplers == 0 and self.sampler == "vllm":
            raise ValueError("sampler: vllm needs cluster.samplers: 1 or more beside several training processes")
        if cluster.min_trainers > cluster.trainers:
            raise ValueError("cluster.min_trainers is above cluster.trainers; lower it")
        if cluster.min_trainers and (cluster.address is None or cluster.shard):
            reason = (
                "without cluster.address" if cluster.address is None else "with cluster.shard, whose slices would grow"
            )
            raise ValueError(f"cluster.min_trainers is not used {reason}; leave it out")
        if cluster.tls and cluster.is_single:
            raise ValueError("cluster.tls is not used with one process, whose connection does not leave this machine")
        if cluster.sampler_gpus > 1 and (cluster.samplers == 0 or self.sampler != "vllm"):
            raise ValueError("cluster.sampler_gpus needs cluster.samplers and sampler: vllm")
        if cluster.samplers and any(arg.startswith(("--tensor-parallel-size", "-tp")) for arg in self.vllm.args):
            raise ValueError("vllm.args: use cluster.sampler_gpus in place of --tensor-parallel-size")
        if cluster.samplers and self.vllm.devices:
            raise ValueError("vllm.devices is not used with cluster.samplers, whose processes are given GPUs")
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
        apart = bool(self.cluster.samplers or self.vllm.devices)
        return EngineConfig(
            source=source,
            kind=self.engine,
            model_memory=self.model_memory,
            engines=len(self.sources()) if self.cluster.is_single else 1,
            vllm_place="none" if self.sampler == "torch" else "apart" if apart else "beside",
            vllm_gpus=max(self.cluster.sampler_gpus, self.vllm.gpus),
            part="training" if self.cluster.samplers else "all",
            shards=self.cluster.trainers if self.cluster.shard else 1,
            keeps_checks=self.check_model == "once",
            **options,
        )
