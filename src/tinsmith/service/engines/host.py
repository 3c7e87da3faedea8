"""The engine of one base model: started, watched, and restarted when it dies. Accepted work waits meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.base import Engine, ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.errors import EngineDied, TinsmithError
from tinsmith.service.engines.admission import AdmissionQueue

log = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 3
"""Engine deaths after which a request that was running at each of them fails."""
CLOSE_S = 5.5
"""Time for an engine to close."""
MAX_RETRY_S = 30.0
"""Longest time between two attempts to restart an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A loaded engine, and the event of its process's death."""

    engine: Engine
    died: asyncio.Event
    sampler_up: asyncio.Event | None = None
    """Set while a separate sampling process answers; None if the engine samples itself."""


EngineFactory = Callable[[EngineConfig], Awaitable[RunningEngine]]


async def start_engine(config: EngineConfig) -> RunningEngine:
    """Start the fake engine in this process, or a real one in its own, where its Python delays no response."""
    if config.kind == "fake":
        return RunningEngine(engine=await asyncio.to_thread(FakeEngine, config), died=asyncio.Event())
    from tinsmith.engine.process import RemoteEngine  # not needed for the fake engine

    if config.sampler == "vllm":
        from tinsmith.engine.vllm.engine import VllmEngine

        engine = await VllmEngine.start(config)
        return RunningEngine(engine=engine, died=engine.died, sampler_up=engine.server.up)
    remote = await RemoteEngine.start(config)
    return RunningEngine(engine=remote, died=remote.died)


class EngineHost:
    """The current engine of one model source. Only its worker calls `start`, `restart` and `stop`."""

    def __init__(self, config: EngineConfig, names: list[str], start: EngineFactory) -> None:
        self.config = config
        self.names = names
        """Names under which the base model is served."""
        self._start_engine = start
        self._running: RunningEngine | None = None
        self._card: ModelCard | None = None
        self._ready = asyncio.Event()
        self._attaching = asyncio.Lock()
        self.isolation_lock = asyncio.Lock()
        """Held by the one suspected sample that may run."""
        self.start_count = 0
        """Number of engine starts."""
        self.admission_queue = AdmissionQueue(config.cache_tokens)
        """Queue of all sampling requests."""
        self.attached: set[str] = set()
        """Versions that the running engine has."""

    @property
    def engine(self) -> Engine:
        """The running engine. Raises EngineDied while there is none."""
        if self._running is None or self._running.died.is_set():
            raise EngineDied(
                f"The engine of {self.config.source} is not running.", "It is being restarted: try again later."
            )
        return self._running.engine

    @property
    def is_up(self) -> bool:
        """Whether the engine is loaded and alive."""
        return self._running is not None and not self._running.died.is_set()

    @property
    def sampler_is_up(self) -> bool:
        """Whether the engine, and its separate sampling process if it has one, are up."""
        if self._running is None or not self.is_up:
            return False
        return self._running.sampler_up is None or self._running.sampler_up.is_set()

    @property
    def died(self) -> asyncio.Event:
        """The death of the current engine."""
        return self._running.died if self._running else asyncio.Event()

    async def card(self) -> ModelCard:
        """Description of the loaded model. Waits for the first start, not for restarts."""
        if self._card is None:
            await self._ready.wait()
        if self._card is None:
            raise EngineDied(f"The engine of {self.config.source} did not start.")
        return self._card

    async def wait_until_ready(self) -> Engine:
        """The engine, once it is up and samples are allowed."""
        while not (self._ready.is_set() and self.is_up):
            self._ready.clear()
            await self._ready.wait()
        return self.engine

    def allow_sampling(self) -> None:
        """Let samples use the engine after a restart."""
        self._ready.set()

    async def start(self) -> None:
        """Start the engine for the first time and allow sampling. Raises the error of the start."""
        await self._load()
        self.allow_sampling()

    async def restart(self) -> None:
        """Start the engine again, with retries: accepted requests must run. Samples wait until `allow_sampling`."""
        wait_s = 1.0
        while True:
            try:
                return await self._load()
            except (TinsmithError, OSError):
                log.exception("The engine of %s does not start; next attempt in %.0f s.", self.config.source, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def stop(self) -> None:
        """Close the engine, or what is left of a dead one."""
        self._ready.clear()
        running, self._running = self._running, None
        if running is None:
            return
        running.died.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await running.engine.close()
        except (TinsmithError, OSError, TimeoutError) as error:
            log.warning("The engine of %s did not close: %s", self.config.source, error)

    async def attach(self, version: str, folder: Path) -> None:
        """Load a saved adapter into the running engine, unless the engine has it."""
        async with self._attaching:
            if version not in self.attached:
                await self.engine.attach(version, folder)
                self.attached.add(version)

    async def detach(self, version: str) -> None:
        """Remove a version from the running engine, if it has it."""
        if version in self.attached and self.is_up:
            self.attached.discard(version)
            await self.engine.detach(version)

    async def _load(self) -> None:
        self._running = await self._start_engine(self.config)
        self._card = self._running.engine.card
        log.info("%s is loaded: %s", self.config.source, _describe(self._card))
        self.start_count += 1
        self.attached = set()


def _describe(card: ModelCard) -> str:
    batches = f", micro-batches of {card.pass_tokens} tokens" if card.pass_tokens else ""
    return f"{card.dtype} on {card.device}{batches}"
