"""What the service must answer: the same requests on an engine in this process, without service and faults."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult, SampleRequest
from tinsmith.engine.build import build
from tinsmith.engine.cluster.config import ClusterConfig, RankConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.interface import Engine

R = TypeVar("R")

LEARNING_RATE = 0.02
PROMPT = (5, 6, 7, 8, 9, 10)
SAMPLE_SEED = 11
SAMPLE_TOKENS = 6
Version = tuple[tuple[float, ...], tuple[int, ...]]
"""What identifies weights: logprobs of PROMPT, and the tokens of a seeded sample after it."""


class Reference:
    """The models of one tenant in an engine of its own."""

    def __init__(self, config: EngineConfig, folder: Path, cluster: ClusterConfig | None = None) -> None:
        """`cluster`: that of the service, whose shards the engine takes over."""
        self._loop = asyncio.new_event_loop()
        self._engine = self._run(_build(config, cluster))
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()
        self.checkpoints: dict[str, Path] = {}
        """tinker:// path -> the folder that the checkpoint must equal."""

    def close(self) -> None:
        """Free the engine."""
        self._run(self._engine.close())
        self._loop.close()

    def create(self, rank: int, seed: int) -> str:
        """A new model. Returns its name here."""
        model = f"model-{next(self._numbers)}"
        self._run(self._engine.create(model, LoraSpec(rank=rank, seed=seed)))
        return model

    def create_from(self, path: str) -> str:
        """A new model with the weights and the optimizer state of a checkpoint."""
        model = f"model-{next(self._numbers)}"
        self.load(model, path)
        return model

    def drop(self, model: str) -> None:
        """Free a model."""
        self._run(self._engine.drop(model))

    def run(self, model: str, rows: Sequence[Sequence[int]], *, forward_only: bool = False) -> list[np.ndarray]:
        """Logprobs of a cross-entropy pass over rows of tokens."""
        data = tuple(
            Datum(
                tokens=np.asarray(row[:-1], np.int32),
                targets=np.asarray(row[1:], np.int64),
                inputs={"weights": np.ones(len(row) - 1, np.float32)},
            )
            for row in rows
        )
        request = Pass(model_id=model, data=data, loss_fn="cross_entropy", forward_only=forward_only)
        [result] = self._run(self._engine.run([request]))
        assert isinstance(result, PassResult), result
        return list(result.logprobs)

    def step(self, model: str) -> float:
        """Take an optimizer step. Returns the norm of the gradient."""
        return self._run(self._engine.step(model, AdamParams(learning_rate=LEARNING_RATE)))["grad_norm"]

    def save(self, model: str, path: str, *, optimizer: bool) -> None:
        """What the checkpoint at a path must hold from now on."""
        folder = self._folder / str(next(self._numbers))
        self._run(self._engine.save(model, folder, optimizer=optimizer))
        self.checkpoints[path] = folder

    def load(self, model: str, path: str) -> None:
        """Load weights and optimizer state of a checkpoint."""
        self._run(self._engine.load(model, self.checkpoints[path], optimizer=True))

    def version(self, model: str | None) -> Version:
        """What a sampling session on the model's weights must answer; None is the base model."""
        name = f"version-{next(self._numbers)}" if model is not None else None
        if model is not None and name is not None:
            self._run(self._engine.capture(model, name))
        request = SampleRequest(
            request_id=f"sample-{name}",
            prompt=np.asarray(PROMPT, np.int32),
            version=name,
            max_tokens=SAMPLE_TOKENS,
            seed=SAMPLE_SEED,
            prompt_logprobs=True,
        )
        result = self._run(self._engine.sample(request))
        if name is not None:
            self._run(self._engine.detach(name))
        assert result.prompt_logprobs is not None
        logprobs = tuple(float(value) for value in result.prompt_logprobs[1:])
        return logprobs, tuple(int(token) for token in result.sequences[0].tokens)

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return self._loop.run_until_complete(work)


async def _build(config: EngineConfig, cluster: ClusterConfig | None) -> Engine:
    return lone_rank(config, cluster) if cluster is not None and cluster.is_group else build(config)


def lone_rank(config: EngineConfig, cluster: ClusterConfig) -> Engine:
    """A group of one rank in this process, with as many shards as those of `cluster` have together."""
    from tests.engine.cluster.trainers.threads import Table, ThreadCollectives
    from tinsmith.engine.cluster.trainers.rank import LeadingRank
    from tinsmith.engine.cluster.trainers.ranks import Ranks
    from tinsmith.engine.torch_engine import TorchEngine

    shards = cluster.shards_of_rows(deterministic=True)
    alone: Any = ThreadCollectives(0, Table(1))
    settings = RankConfig(engine=config, cluster=ClusterConfig(shards=shards), rank=0, rendezvous="")
    ranks = Ranks(settings, alone)
    return LeadingRank(TorchEngine(config, exchange=ranks), ranks, alone)


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
