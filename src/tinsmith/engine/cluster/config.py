"""Settings of a cluster: how many processes train and sample a base model, and on which machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from tinsmith.engine.adapters.cache import DEFAULT_CACHE
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.settings import Settings

DETERMINISTIC_SHARDS = 8
"""Shards of deterministic mode with several ranks, by default."""


class ClusterConfig(Settings):
    """Processes of one base model. The defaults are one process on this machine."""

    address: str | None = None
    """Ray cluster whose machines run the processes, as HOST:PORT; `auto` is the one of this machine. Default: the
    processes run on this machine, without Ray."""

    trainers: int = Field(default=1, ge=1)
    """Training processes (ranks) of a base model. They share out the rows of a request and sum their gradients at each
    optimizer step."""

    shards: int = Field(default=0, ge=0)
    """Deterministic mode: shares that the rows of every request are cut into, a power of two that `trainers` divides.
    The weights have the same bits for every number of trainers with the same shards, one included. Each shard takes
    memory for a gradient of every adapter, and gradients travel whole. Default: 8 with several trainers, else 1."""

    min_trainers: int = Field(default=0, ge=0)
    """On a Ray cluster: fewest training processes with which a base model goes on when machines are lost and the
    cluster has no others. The next start of the group takes all its processes again, if there are machines. Default:
    the group waits for machines."""

    shard: bool = False
    """Shard the base model over the training processes with FSDP2, each of which gathers a layer at a time: for a base
    model that is larger than one device. Dense models of the fast path only; sampling then needs vLLM."""

    tls: bool = False
    """Encrypt the connections between the server and the processes, with keys that are made at each start: no
    certificates are needed. What training processes exchange with each other is not encrypted."""

    data_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which an exchange of gradients between training processes counts as failed: they are then
    restarted."""

    cache: Path = DEFAULT_CACHE
    """Folder on each machine for adapters from the object store, where machines do not see the data folder. Its size is
    `store_cache`; processes of several services may share it."""

    samplers: int = Field(default=0, ge=0)
    """Sampling processes (replicas) of a base model. 0: the first training process samples."""

    sampler_gpus: int = Field(default=1, ge=1)
    """GPUs of each sampling process, on one machine, which vLLM uses tensor parallel: for a base model that is larger
    than one GPU."""

    @property
    def is_single(self) -> bool:
        """Whether one process on this machine trains and samples."""
        return self.address is None and not self.is_group and self.samplers == 0

    @property
    def is_group(self) -> bool:
        """Whether training takes a group of ranks, which may be a single one in deterministic mode."""
        return self.trainers > 1 or self.shards > 1 or self.shard

    def group_on(self, slots: int, *, deterministic: bool) -> ClusterConfig | None:
        """Settings of the largest group that this many slots and `min_trainers` allow; None if there is none.

        In deterministic mode the shards stay, so that its weights have the same bits.
        """
        shards = self.shards_of_rows(deterministic=deterministic)
        for count in range(min(slots, self.trainers), max(self.min_trainers, 1) - 1, -1):
            if not deterministic:
                return self.model_copy(update={"trainers": count})
            if shards % count == 0:
                return self.model_copy(update={"trainers": count, "shards": shards})
        return None

    def shards_of_rows(self, *, deterministic: bool) -> int:
        """Shares that the ranks cut the rows of a request into. Raises ConfigError if the settings do not fit."""
        if not deterministic:
            if self.shards:
                raise ConfigError(
                    f"shards={self.shards} is not used without deterministic.", "Set it, or leave it out."
                )
            return self.trainers
        shards = self.shards or (DETERMINISTIC_SHARDS if self.trainers > 1 else 1)
        if shards & (shards - 1) or shards % self.trainers:
            raise ConfigError(
                f"{self.trainers} trainers cannot share {counted(shards, 'shard')} in deterministic mode.",
                "Shards are a power of two, and a multiple of the trainers.",
            )
        return shards


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Settings of one rank of a group."""

    engine: EngineConfig
    cluster: ClusterConfig
    rank: int
    rendezvous: str
    """URL where the ranks of this generation meet."""
