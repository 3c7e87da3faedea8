"""The engine's interface: the protocols Trainer, Sampler and Engine, which exchange the records of `base`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tinsmith.engine.base import (
    AdamParams,
    LoraSpec,
    ModelCard,
    OnDelta,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SavedAdapter,
)
from tinsmith.errors import TinsmithError


class Trainer(Protocol):
    """Adapters in training on one base model. Calls on a model take effect in their order; those on others overlap.

    Each call may raise a TinsmithError; the model is then unchanged.
    """

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        """Create an adapter: A Kaiming-uniform from the seed, B zero."""
        ...

    async def fork(self, model_id: str, source: str | SavedAdapter, *, optimizer: bool) -> int:
        """Create a model with the weights of the model `source`, or of a saved adapter; returns its parameters.

        It shares their memory until its first step. Without optimizer its moments start at zero.
        """
        ...

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        """Run requests of any models; returns a result or an error for each. Calls share packed micro-batches.

        Gradients add to what each model has accumulated since its last step.
        """
        ...

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Take an AdamW step with the accumulated gradient and clear it; returns metrics."""
        ...

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        """Write the adapter (and optimizer state) as a PEFT folder, atomically; returns its size in bytes."""
        ...

    async def load(self, model_id: str, source: SavedAdapter, *, optimizer: bool) -> None:
        """Load a saved adapter into a model, created if necessary; without optimizer its moments start at zero."""
        ...

    async def drop(self, model_id: str) -> None:
        """Delete a model; unknown names are ignored."""
        ...


class Sampler(Protocol):
    """Samples from the base model or from immutable adapter versions, for many callers concurrently."""

    async def capture(self, model_id: str, version: str) -> None:
        """Freeze the model's current weights as a version, in memory."""
        ...

    async def persist(self, version: str, to: Path) -> int:
        """Write a captured version as a PEFT folder; it may then be evicted from memory. Returns its size in bytes."""
        ...

    async def attach(self, version: str, source: SavedAdapter) -> None:
        """Register a saved adapter folder as a version; it is read when first used."""
        ...

    async def detach(self, version: str) -> None:
        """Delete a version; unknown names are ignored."""
        ...

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """Sample until every sequence has ended; `on_delta` receives their tokens meanwhile."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop a request; its `sample` call raises Gone."""
        ...


class Engine(Trainer, Sampler, Protocol):
    """A trainer and a sampler over the same base model."""

    @property
    def card(self) -> ModelCard:
        """The loaded base model."""
        ...

    @property
    def progress(self) -> int:
        """A counter that grows while the engine works. May be read from any thread."""
        ...

    async def release_memory(self) -> None:
        """Give back the memory that is kept for speed only: cached prefixes, freed blocks. Results do not change."""
        ...

    async def close(self) -> None:
        """Free all resources."""
        ...
