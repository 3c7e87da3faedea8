"""The engine of one base model: started, watched, and restarted when it dies. Accepted work waits meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tinsmith.engine.base import ModelCard, SavedAdapter
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.status import ProcessStatus
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.interface import Engine
from tinsmith.engine.processes.client import ServedEngine, start_local
from tinsmith.engine.processes.supervisor import kill_when_stalled, start_until_up
from tinsmith.engine_options import CPU_CACHE_TOKENS
from tinsmith.errors import EngineDied, NotFound, TinsmithError
from tinsmith.service.engines.admission import AdmissionQueue
from tinsmith.service.engines.occupancy import Occupancy

log = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 3
"""Engine deaths after which a request fails that ran by itself at each of them."""
OWN_DEATH, OUTSIDE_DEATH = 10, 1
"""Points for a death that the running request may have caused, and for one from outside: someone killed or stopped the
process. The latter are not free, because a program that watches the machine's memory kills from outside too."""
MAX_DEATH_POINTS = MAX_ENGINE_DEATHS * OWN_DEATH
CLOSE_S = 5.5
"""Time for an engine to close."""
RELEASE_S = 10.0
"""Time for an engine to give back memory: it does so between two micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A loaded engine, and the event of its process's death."""

    engine: Engine
    died: asyncio.Event
    process: ServedEngine | None = None
    """The engine's process; None if the engine is in this one."""
    sampler_up: asyncio.Event | None = None
    """Set while a separate sampling process answers; None if the engine samples itself."""
    pool: SamplerPool | None = None
    """The replicas that sample, where there are several."""
    processes: Callable[[], Sequence[ProcessStatus]] | None = None
    """State of each process of an engine of several."""
    retire: Callable[[], Awaitable[None]] | None = None
    """Ends what the engine's next start would use again, when there is none."""


EngineState = Literal["loading", "up", "stalled", "restarting", "stopped"]
EngineFactory = Callable[[EngineConfig], Awaitable[RunningEngine]]


async def start_engine(config: EngineConfig) -> RunningEngine:
    """Start the fake engine in this process, or a real one in its own, where its Python delays no response."""
    if config.kind == "fake":
        return RunningEngine(engine=await asyncio.to_thread(FakeEngine, config), died=asyncio.Event())
    remote = await start_local(config)
    return RunningEngine(engine=remote, died=remote.died, process=remote)


def starting_after(prepare: Callable[[], Awaitable[None]], start: EngineFactory) -> EngineFactory:
    """A factory that awaits `prepare` before each start."""

    async def prepared_start(config: EngineConfig) -> RunningEngine:
        await prepare()
        return await start(config)

    return prepared_start


def death_points(death: EngineDied) -> int:
    """What a death of the engine counts against a request that ran by itself."""
    return OUTSIDE_DEATH if death.from_outside else OWN_DEATH


class EngineHost:
    """The current engine of one model source. Only its worker calls `start`, `restart` and `stop`."""

    def __init__(self, config: EngineConfig, names: list[str], start: EngineFactory) -> None:
        self.config = config
        self.names = names
        """Names under which the base model is served."""
        self._start_engine = start
        self._running: RunningEngine | None = None
        self._last: RunningEngine | None = None
        """The engine that was started last."""
        self._card: ModelCard | None = None
        self._ready = asyncio.Event()
        self._attaching = asyncio.Lock()
        self._watchdog: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.occupancy = Occupancy()
        """Who uses the engine now."""
        self.isolation_lock = asyncio.Lock()
        """Held by the one suspected sample that may run."""
        self.start_count = 0
        """Number of engine starts."""
        self.admission_queue = AdmissionQueue(
            CPU_CACHE_TOKENS if config.cache_tokens == "auto" else config.cache_tokens
        )
        """Queue of all sampling requests."""
        self.attached: set[str] = set()
        """Versions that the running engine has."""

    @property
    def engine(self) -> Engine:
        """The running engine. Raises EngineDied while there is none."""
        if self._running is None or self._running.died.is_set():
            raise EngineDied(
                f"The engine of {self.config.source} is not running.",
                "It is being restarted: try again later.",
                from_outside=True,
            )
        return self._running.engine

    @property
    def is_up(self) -> bool:
        """Whether the engine is loaded and alive."""
        return self._running is not None and not self._running.died.is_set()

    @property
    def state(self) -> EngineState:
        """What the engine does; `stalled` from the moment at which the watchdog kills it until it is started again."""
        if self._is_stopped:
            return "stopped"
        if self.is_up:
            return "up"
        if self.start_count == 0:
            return "loading"
        is_stalled = self._watchdog is not None and self._watchdog.done() and not self._watchdog.cancelled()
        return "stalled" if is_stalled else "restarting"

    @property
    def progress_age_s(self) -> float:
        """Seconds since the engine's last progress, while it works; 0 while it has nothing to do."""
        process = self._running.process if self._running is not None else None
        return process.heartbeats.progress_age_s if process is not None else 0.0

    @property
    def sampler_is_up(self) -> bool:
        """Whether the engine, and its separate sampling process if it has one, are up."""
        if self._running is None or not self.is_up:
            return False
        return self._running.sampler_up is None or self._running.sampler_up.is_set()

    def pause_reason(self, *, samples: bool) -> str:
        """Why no request can run now, of samples or of training; empty if one can."""
        is_up = self.sampler_is_up if samples else self.is_up
        return "" if is_up else f"the engine of {self.names[0]} is loading or restarting"

    @property
    def pool(self) -> SamplerPool | None:
        """The replicas that sample; None if there are none besides the engine."""
        return self._running.pool if self._running is not None else None

    @property
    def died(self) -> asyncio.Event:
        """The death of the current engine."""
        return self._running.died if self._running else asyncio.Event()

    @property
    def latest_card(self) -> ModelCard | None:
        """Description of the model as last loaded; None before that."""
        return self._card

    def processes(self) -> Sequence[ProcessStatus]:
        """State of each process of the engine."""
        if self._last is None:
            return []
        if self._last.processes is not None:
            return self._last.processes()
        process = self._last.process
        return [
            ProcessStatus(
                name="engine",
                role="trainer",
                machine=socket.gethostname(),
                host="127.0.0.1",
                gpus=(),
                pid=process.pid if process is not None and self.is_up else 0,
                generation=self.start_count,
                is_up=self.is_up,
            )
        ]

    async def card(self) -> ModelCard:
        """Description of the loaded model. Waits for the first start, not for restarts."""
        if self._card is None:
            await self._ready.wait()
        if self._card is None:
            raise EngineDied(f"The engine of {self.config.source} did not start.", "The server's log has the reason.")
        return self._card

    async def wait_until_ready(self) -> Engine:
        """The engine, once it is up and samples are allowed. Raises NotFound if it was closed for good."""
        while not (self._ready.is_set() and self.is_up):
            if self._is_stopped:
                raise NotFound(f"{self.config.source} is not served any more.", "Use another base model.")
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
        await start_until_up(f"The engine of {self.config.source}", self._load)

    async def stop(self) -> None:
        """Close the engine, or what is left of a dead one."""
        self._ready.clear()
        running, self._running = self._running, None
        if running is None:
            return
        has_died = running.died.is_set()
        running.died.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await running.engine.close()
        except (TinsmithError, OSError, TimeoutError) as error:
            log.warning("The engine of %s did not close: %s", self.config.source, error)
        if has_died:
            end = running.process.end if running.process is not None else None
            log.warning("The engine of %s died: %s.", self.config.source, end.text if end else "the reason is unknown")
        self._end_watchdog()

    async def close(self) -> None:
        """Close the engine for good."""
        self._is_stopped = True
        await self.stop()
        if self._last is not None and self._last.retire is not None:
            await self._last.retire()
        self._ready.set()  # for those that wait for it

    async def release_memory(self) -> None:
        """Let the engine, if it is up, give back the memory that it keeps for speed only. Raises nothing."""
        if not self.is_up:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self.engine.release_memory()
        except (TinsmithError, TimeoutError) as error:
            log.warning("The engine of %s keeps its caches: %s", self.config.source, error or "it is busy")

    async def attach(self, version: str, source: SavedAdapter) -> None:
        """Load a saved adapter into the running engine, unless the engine has it."""
        async with self._attaching:
            if version not in self.attached:
                await self.engine.attach(version, source)
                self.attached.add(version)

    async def detach(self, version: str) -> None:
        """Remove a version from the running engine, if it has it."""
        if version in self.attached and self.is_up:
            self.attached.discard(version)
            await self.engine.detach(version)

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _fit_queue(self) -> None:
        """Admit as many samples as the living replicas can run, or those of one where there is none now."""
        self.admission_queue.resize(max(1, self.pool.living) if self.pool is not None else 1)

    async def _load(self) -> None:
        self._watchdog = None
        self._running = self._last = await self._start_engine(self.config)
        if (process := self._running.process) is not None:
            watch = kill_when_stalled(process, self.config.engine_timeout_s, f"The engine of {self.config.source}")
            self._watchdog = asyncio.create_task(watch)
        self._fit_queue()
        if self._running.pool is not None:
            self._running.pool.on_change = self._fit_queue
        self._card = self._running.engine.card
        self.admission_queue.state_tokens = self._card.state_tokens
        if self._card.sampling_tokens:
            self.admission_queue.set_cache_tokens(self._card.sampling_tokens)
        log.info("%s is loaded: %s", self.config.source, _describe(self._card))
        self.start_count += 1
        self.attached = set()


def _describe(card: ModelCard) -> str:
    batches = f", micro-batches of {card.pass_tokens} tokens" if card.pass_tokens else ""
    return f"{card.dtype} on {card.device}{batches}"
