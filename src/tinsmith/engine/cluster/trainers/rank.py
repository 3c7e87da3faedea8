"""One rank of a trainer group: the program of `python -m tinsmith.engine.cluster.trainers.rank`.

Rank 0 is the engine that the service talks to. It sends every command that changes a model to the other ranks, which
follow, and samples, saves and captures by itself. Commands run one after the other, in the order of arrival; runs that
wait at the same time become one, unless a command before them concerns the same model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from typing_extensions import override

from tinsmith.engine import autotune
from tinsmith.engine.adapters.cached_engine import with_objects
from tinsmith.engine.base import ModelCard, OnDelta, Pass, PassResult, SampleRequest, SampleResult, SavedAdapter
from tinsmith.engine.cluster.config import RankConfig
from tinsmith.engine.cluster.trainers.ranks import Collectives, Ranks
from tinsmith.engine.processes.rpc import DelegatingEngine, Method
from tinsmith.engine.processes.worker import ParentLink, open_link, serve
from tinsmith.engine.torch_engine import TorchEngine
from tinsmith.errors import TinsmithError, Unsupported

P = ParamSpec("P")
R = TypeVar("R")

RUN = "run"
COMMANDS = frozenset((RUN, "create", "fork", "step", "load", "drop", "release_memory"))
"""Methods that all ranks execute; the others concern rank 0 alone."""


@dataclass(eq=False, slots=True)
class _Command:
    """A call that all ranks execute."""

    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    models: frozenset[str]
    """Models that it concerns."""
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LeadingRank(DelegatingEngine):
    """Rank 0. Implements `engine.interface.Engine`."""

    def __init__(self, engine: TorchEngine, ranks: Ranks, collectives: Collectives) -> None:
        super().__init__(engine)
        self._torch_engine, self._ranks, self._collectives = engine, ranks, collectives
        self._waiting: deque[_Command] = deque()
        self._worker: asyncio.Task[None] | None = None

    @override
    async def call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        if method.__name__ not in COMMANDS:
            return await super().call(method, *args, **options)
        models = {str(each) for each in args[:1]}
        return await self._command(_Command(method.__name__, args, options, frozenset(models)))

    @override
    async def fork(self, model_id: str, source: str | SavedAdapter, *, optimizer: bool) -> int:
        models = frozenset((model_id, str(source)))
        return await self._command(_Command("fork", (model_id, source), {"optimizer": optimizer}, models))

    @override
    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        models = frozenset(request.model_id for request in passes)
        return await self._command(_Command(RUN, (passes,), {}, models))

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        if self._ranks.lockstep:  # each token would gather the whole base model
            raise Unsupported(
                "A base model that is sharded over training processes is not sampled from there.",
                "Sample with vLLM (--samplers with sampler: vllm), without top_k, top_p and questions about prompts.",
            )
        return await super().sample(request, on_delta)

    @override
    async def close(self) -> None:
        """The ranks end with their connections."""

    async def _command(self, command: _Command) -> Any:
        """Have all ranks call a method, and return its result here."""
        self._waiting.append(command)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await command.done

    async def _work(self) -> None:
        while self._waiting:
            commands = self._next()
            method, args, options = commands[0].method, commands[0].args, commands[0].options
            if method == RUN:
                args = ([request for command in commands for request in command.args[0]],)
            await self._collectives.call(self._collectives.broadcast, (method, args, options))
            try:
                result = await execute(self._torch_engine, self._ranks, method, args, options)
            except Exception as error:  # noqa: BLE001 - the caller's
                for command in commands:
                    if not command.done.done():  # its caller was cancelled
                        command.done.set_exception(error)
                continue
            for command in commands:
                own = result
                if method == RUN:
                    count = len(command.args[0])
                    own, result = result[:count], result[count:]
                if not command.done.done():
                    command.done.set_result(own)
        self._worker = None

    def _next(self) -> list[_Command]:
        """The command that waits longest; if it is a run, with all runs that no earlier command holds up."""
        commands = [self._waiting.popleft()]
        if commands[0].method != RUN:
            return commands
        left: deque[_Command] = deque()
        held: set[str] = set()
        for command in self._waiting:
            if command.method == RUN and held.isdisjoint(command.models):
                commands.append(command)
            else:
                left.append(command)
                held |= command.models
        self._waiting = left
        return commands


class FollowingRank:
    """Any other rank: executes the commands of rank 0 until it ends."""

    def __init__(self, engine: TorchEngine, ranks: Ranks, collectives: Collectives) -> None:
        self._engine, self._ranks, self._collectives = engine, ranks, collectives

    @property
    def card(self) -> ModelCard:
        """The loaded base model."""
        return self._engine.card

    @property
    def progress(self) -> int:
        """Grows while it works."""
        return self._engine.progress

    async def follow(self) -> None:
        """Execute commands. Never returns."""
        while True:
            command = await self._collectives.call(self._collectives.broadcast, None)
            try:
                await execute(self._engine, self._ranks, *command)
            except Exception:  # noqa: BLE001 - rank 0 has the same error, and answers with it
                continue


async def execute(engine: TorchEngine, ranks: Ranks, method: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call a method of the engine; returns once all ranks have, with the same outcome."""
    try:
        result = await getattr(engine, method)(*args, **options)
    except Exception as error:
        await ranks.agree(error)
        raise
    await ranks.agree(None)
    return result


def load(config: RankConfig) -> LeadingRank | FollowingRank:
    """Meet the other ranks and load the base model. Raises its errors, on all ranks."""
    device = torch.device("cuda" if config.engine.device != "cpu" and torch.cuda.is_available() else "cpu")
    collectives = Collectives(config, device)
    ranks = Ranks(config, collectives)
    ranks.compare_machines(device)
    prepared = None
    if config.cluster.shard:
        from tinsmith.engine.cluster.trainers import sharded

        autotune.check_memory(config.engine)
        prepared = sharded.prepare(config.engine, collectives.mesh(device))
    engine = TorchEngine(config.engine, exchange=ranks, prepared=prepared)
    return (LeadingRank if ranks.leads else FollowingRank)(engine, ranks, collectives)


async def _serve(link: ParentLink, payload: bytes) -> None:
    """Load, then serve the parent, and on ranks that follow also rank 0.

    Rank 0 reads what the others are sent (`Ranks.read`), so it alone needs the cache of objects.
    """
    loaded: list[LeadingRank | FollowingRank] = []

    def load_rank(config: RankConfig) -> Any:
        loaded.append(load(config))
        return loaded[0]

    def load_any(config: RankConfig) -> Any:
        return with_objects(load_rank, b"" if config.rank else payload)(config)

    serving = asyncio.create_task(serve(link, load_any))
    await asyncio.sleep(0)  # returns after loading, which blocks the loop
    if loaded and isinstance(loaded[0], FollowingRank):
        await loaded[0].follow()
    await serving


def main() -> None:
    """Entry point of the process."""
    asyncio.run(_serve(*open_link()))


if __name__ == "__main__":
    main()
