"""One base model's engine: started, watched, started again when it dies. What is promised meanwhile waits."""

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
"""Engines that one request may take down before it is given up."""
CLOSE_S = 5.5
RETRY_CAP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine that is loaded, and the event of its process's death."""

    engine: Engine
    died: asyncio.Event
    sampler_up: asyncio.Event | None = None
    """Set while a sampler that is a process of its own answers; None where the engine samples itself."""


EngineFactory = Callable[[EngineConfig], Awaitable[RunningEngine]]


async def start_engine(config: EngineConfig) -> RunningEngine:
    """The fake in this process; a real engine in one of its own, so that its Python never delays an answer."""
    if config.kind == "fake":
        return RunningEngine(engine=FakeEngine(config), died=asyncio.Event())
    from tinsmith.engine.process import RemoteEngine  # with kind="fake" nothing of it is needed

    if config.sampler == "vllm":
        from tinsmith.engine.vllm.engine import VllmEngine

        engine = await VllmEngine.start(config)
        return RunningEngine(engine=engine, died=engine.died, sampler_up=engine.server.up)
    remote = await RemoteEngine.start(config)
    return RunningEngine(engine=remote, died=remote.died)


class EngineHost:
    """Holds the engine of one source while it lives. `up` and `down` are its worker's to call."""

    def __init__(self, config: EngineConfig, names: list[str], start: EngineFactory) -> None:
        self.config = config
        self.names = names
        self._start = start
        self._started: RunningEngine | None = None
        self._card: ModelCard | None = None
        self._ready = asyncio.Event()
        self._attaching = asyncio.Lock()
        self.isolation_lock = asyncio.Lock()
        """Held by the one suspected sample that may run."""
        self.start_count = 0
        """How often it was started."""
        self.admission_queue = AdmissionQueue(config.cache_tokens)
        """Every sample goes through it."""
        self.attached: set[str] = set()
        """Versions that the living engine has."""

    @property
    def engine(self) -> Engine:
        """The living engine. Raises EngineDied while there is none."""
        if self._started is None or self._started.died.is_set():
            raise EngineDied(f"The engine of {self.config.source} is not running.", "It is being started again.")
        return self._started.engine

    @property
    def is_up(self) -> bool:
        """Loaded and alive."""
        return self._started is not None and not self._started.died.is_set()

    @property
    def sampler_is_up(self) -> bool:
        """The engine is up, and so is whoever samples for it."""
        if self._started is None or not self.is_up:
            return False
        return self._started.sampler_up is None or self._started.sampler_up.is_set()

    @property
    def died(self) -> asyncio.Event:
        """The death of the present engine."""
        return self._started.died if self._started else asyncio.Event()

    async def card(self) -> ModelCard:
        """What is loaded; waits for the first start, not for later ones."""
        if self._card is None:
            await self._ready.wait()
        if self._card is None:
            raise EngineDied(f"The engine of {self.config.source} did not start.")
        return self._card

    async def wait_until_ready(self) -> Engine:
        """The engine, once it runs and samples are admitted."""
        while not (self._ready.is_set() and self.is_up):
            self._ready.clear()
            await self._ready.wait()
        return self.engine

    def allow_sampling(self) -> None:
        """Samples may use the engine that was started again."""
        self._ready.set()

    async def start(self) -> None:
        """Start the engine, for everyone. Raises what its start raises."""
        await self._load()
        self.allow_sampling()

    async def _load(self) -> None:
        self._started = await self._start(self.config)
        self._card = self._started.engine.card
        log.info("%s is loaded: %s", self.config.source, _described(self._card))
        self.start_count += 1
        self.attached = set()

    async def restart(self) -> None:
        """Start it as often as it takes: what is promised must be kept. Samples wait until `admit`."""
        wait = 1.0
        while True:
            try:
                return await self._load()
            except (TinsmithError, OSError):
                log.exception("The engine of %s does not start; next try in %.0f s.", self.config.source, wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, RETRY_CAP_S)

    async def stop(self) -> None:
        """Close what is left of the engine."""
        self._ready.clear()
        started, self._started = self._started, None
        if started is None:
            return
        started.died.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await started.engine.close()
        except (TinsmithError, OSError, TimeoutError) as error:
            log.warning("The engine of %s did not close: %s", self.config.source, error)

    async def attach(self, version: str, folder: Path) -> None:
        """Make a saved adapter known to the living engine, once however many ask."""
        async with self._attaching:
            if version not in self.attached:
                await self.engine.attach(version, folder)
                self.attached.add(version)

    async def detach(self, version: str) -> None:
        """The living engine may forget the version."""
        if version in self.attached and self.is_up:
            self.attached.discard(version)
            await self.engine.detach(version)


def _described(card: ModelCard) -> str:
    packed = f", micro-batches of {card.pass_tokens} tokens" if card.pass_tokens else ""
    return f"{card.dtype} on {card.device}{packed}"
