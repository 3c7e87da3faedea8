"""Typed calls of an engine's methods, in this process or another.

A call names a method by its function, as in `call(Engine.step, model_id, adam)`: the types of its arguments and of its
reply are those of the function, also where the engine is in another process. Such an engine takes a Call and answers
with a Reply, before which a sample with `on_delta` sends Deltas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from typing_extensions import override

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
    SequenceDelta,
)
from tinsmith.engine.interface import Engine, Sampler
from tinsmith.errors import TinsmithError

P = ParamSpec("P")
R = TypeVar("R")

Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
"""An async method, as the function in its class or protocol."""


class Call(NamedTuple):
    """The message that calls a method of the engine in another process."""

    number: int
    """Found in its reply and its deltas."""
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    streams: bool
    """Whether the caller wants the deltas of a sample."""


class Delta(NamedTuple):
    """New tokens of a sample, before its reply."""

    number: int
    delta: SequenceDelta


class Reply(NamedTuple):
    """The result or the error of a call."""

    number: int
    ok: bool
    value: Any


def methods_of(kind: type) -> Mapping[str, inspect.Signature]:
    """The public async methods of a class or protocol, which calls from other processes may name."""
    members = inspect.getmembers(kind, inspect.iscoroutinefunction)
    return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}


def bound(target: object, method: Method[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The method of this name of an object that has it, for example of one that implements the method's protocol."""
    return getattr(target, method.__name__)


class EngineClient:
    """The methods of `engine.interface.Engine` but `close`, all of them by `call`."""

    async def call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a method of the engine."""
        raise NotImplementedError

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        await self.call(Engine.create, model_id, lora)

    async def fork(self, model_id: str, source: str | SavedAdapter, *, optimizer: bool) -> int:
        return await self.call(Engine.fork, model_id, source, optimizer=optimizer)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        return await self.call(Engine.run, list(passes))

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.call(Engine.step, model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self.call(Engine.save, model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: SavedAdapter, *, optimizer: bool) -> None:
        await self.call(Engine.load, model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self.call(Engine.drop, model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self.call(Engine.capture, model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self.call(Engine.persist, version, to)

    async def attach(self, version: str, source: SavedAdapter) -> None:
        await self.call(Engine.attach, version, source)

    async def detach(self, version: str) -> None:
        await self.call(Engine.detach, version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        return await self.call(Engine.sample, request, on_delta=on_delta)

    async def cancel(self, request_id: str) -> None:
        await self.call(Engine.cancel, request_id)

    async def release_memory(self) -> None:
        await self.call(Engine.release_memory)


class DelegatingEngine(EngineClient):
    """An engine that passes calls on to another; subclasses override what they change."""

    def __init__(self, engine: Engine, sampler: Sampler | None = None) -> None:
        """`sampler`: where the methods of `Sampler` go, if not to the engine."""
        self._engine = engine
        self._sampler = engine if sampler is None else sampler

    @property
    def card(self) -> ModelCard:
        return self._engine.card

    @property
    def progress(self) -> int:
        return self._engine.progress

    @override
    async def call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        target = self._sampler if method.__name__ in SAMPLER_METHODS else self._engine
        return await bound(target, method)(*args, **options)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()


SAMPLER_METHODS = methods_of(Sampler)
