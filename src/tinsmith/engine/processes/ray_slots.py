"""Slots on the machines of a Ray cluster. Ray decides where a process runs, and sees the deaths of machines.

Each slot is a node agent: an actor in a bundle of a placement group, which Ray starts again, on another machine if need
be. Calls to node agents go through Ray; messages of engines do not (`dial`). Node agents end with the service, which is
their driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    ActorDiedError,
    ActorUnavailableError,
    RayError,
)
from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)
from typing_extensions import override

from tinsmith.engine.processes.dial import PING_S, Address, LaunchToken, dial
from tinsmith.engine.processes.machine import Machine, versions
from tinsmith.engine.processes.node_agent import LOG_LINES, NodeAgent, SlotLocation
from tinsmith.engine.processes.ray_checks import check_address, check_locations
from tinsmith.engine.processes.slots import START_S, Connection, Program, Slot, Slots, Strategy
from tinsmith.engine.processes.tls import Identity
from tinsmith.errors import ConfigError, EngineDied

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

REACH_S = 30.0
"""Time to reach a node agent, which Ray may be starting on another machine."""
CALL_S = 2 * START_S
"""Time for an answer of a node agent, of which the start of a process takes longest."""
RETRY_S = 0.5
WAIT_LOG_S = 30.0
"""Time between two log lines while the cluster has too few free GPUs or cores."""
AGENT_SHARE = 0.1
"""Share of its bundle's core and GPU that a node agent takes. If Ray's head ends while it is placed, Ray keeps a lease
that nobody uses or gives back; the next attempt needs room beside that."""
_STRATEGIES: dict[Strategy, str] = {"pack": "PACK", "strict_pack": "STRICT_PACK", "scatter": "SPREAD"}


class RayNodeAgent(NodeAgent):
    """A node agent as an actor. The machine's installation of this package runs it."""

    async def location(self) -> SlotLocation:
        """Where it is."""
        host = ray.util.get_node_ip_address()
        return await asyncio.to_thread(self.describe, machine_name(socket.gethostname(), _own_node()), host)


def _own_node() -> str:
    return ray.get_runtime_context().get_node_id()


def machine_name(host_name: str, node_id: str) -> str:
    """Name of a node, for people, and unique: several nodes may run on one machine."""
    return f"{host_name}/{node_id[:6]}"


class RayProcess:
    """A process in a slot. Implements SlotProcess."""

    def __init__(
        self,
        agent: Any,
        machine: str,
        pid: int,
        connect: Callable[[int], Awaitable[Connection]],
    ) -> None:
        self.ping_s = PING_S
        self._connect = connect
        self.machine = machine
        self.died = asyncio.Event()
        self.code: int | None = None
        self.pid = pid
        self.is_ended = False
        """Whether the service ended it."""
        self._agent = agent
        self._ending: set[asyncio.Task[None]] = set()
        self._watch = asyncio.create_task(self._wait())

    async def connect(self, buffer: int) -> Connection:
        return await self._connect(buffer)

    def kill(self) -> None:
        self.is_ended = True
        if not self.died.is_set():
            task = asyncio.create_task(self._end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def end(self) -> None:
        self.is_ended = True
        if not self.died.is_set():
            await self._end()
        await asyncio.shield(self._watch)

    async def _end(self) -> None:
        with contextlib.suppress(RayError):  # a node agent that is gone has taken its process with it: `_wait` knows
            await self._agent.end.remote(self.pid)

    async def _wait(self) -> None:
        """Wait for the end that its node agent reports, or for that agent's end, which the process does not outlive."""
        while True:
            try:
                self.code = await self._agent.ended.remote(self.pid)
                break
            except ActorUnavailableError:  # perhaps the network: the same node agent may answer again
                if await asyncio.to_thread(_is_lost, self.machine):
                    break
                await asyncio.sleep(RETRY_S)
            except RayError:
                break
        self.died.set()


class RaySlot:
    """A slot in a Ray cluster. Implements Slot."""

    def __init__(self, name: str, agent: Any, identity: Identity | None) -> None:
        self.name = name
        self._identity = identity
        self.process: RayProcess | None = None
        self._agent = agent
        self._location: SlotLocation | None = None
        self._report: asyncio.Task[None] | None = None

    @property
    def location(self) -> SlotLocation:
        """Where its node agent was last."""
        assert self._location is not None, "RaySlots.slots locates every slot"
        return self._location

    @property
    def gpus(self) -> tuple[str, ...]:
        return self.location.gpus

    @property
    def machine(self) -> str:
        return self.location.machine.name

    @property
    def host(self) -> str:
        return self.location.machine.host

    async def locate(self) -> SlotLocation:
        """Ask its node agent where it is. Raises EngineDied if there is none for REACH_S."""
        location: SlotLocation = await self._reach("location")
        self._location = location
        return location

    async def start(self, program: Program, generation: int) -> RayProcess:
        await self.end()
        location = await self.locate()
        check_locations([location])  # it may be another machine than before
        launch_token = LaunchToken.new(generation, location.machine.host, program.payload, self._identity)
        started = await self._call("start", program, launch_token, os.getcwd())
        if not isinstance(started, tuple):
            raise started
        pid, address = started
        connect = partial(dial, address, launch_token, self._identity)
        self.process = RayProcess(self._agent, location.machine.name, pid, connect)
        self._report = asyncio.create_task(self._log_end(self.process))
        return self.process

    async def has_machine(self) -> bool:
        try:
            await self.locate()
        except EngineDied:
            return False
        return True

    async def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        await self.locate()
        return await self._call("run", function, args, options)

    async def log_tail(self, lines: int) -> str:
        return await self._call("log_tail", lines)

    async def bandwidth(self, to: RaySlot, size: int) -> float:
        """Bytes per second from its machine to that of another slot, measured with `size` bytes."""
        port = await to._call("receive", to.host)
        return size / await self._call("send", Address(to.host, port), size)

    async def end(self) -> None:
        if self.process is not None:
            await self.process.end()

    def drop(self) -> None:
        """End the node agent."""
        if self._report is not None:
            self._report.cancel()
        ray.kill(self._agent)

    async def _log_end(self, process: RayProcess) -> None:
        """Log the last lines of a process that ends by itself, but not because its connection was closed: its log is on
        its machine."""
        await process.died.wait()
        if process.is_ended or not process.code:
            return
        with contextlib.suppress(EngineDied):
            lines = await self.log_tail(LOG_LINES)
            log.warning("%s on %s ended with code %d; its last lines:", self.name, self.machine, process.code)
            for line in lines.splitlines() or ["(nothing)"]:
                log.warning("    %s", line)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_S):
                return await getattr(self._agent, method).remote(*args)
        except (TimeoutError, RayError) as error:
            raise EngineDied(
                f"The node agent of {self.name} on {self.machine} does not answer: {type(error).__name__}.",
                "Ray starts it again, on another machine if need be.",
                from_outside=True,
            ) from error

    async def _reach(self, method: str) -> Any:
        """Call a node agent that may be on its way to another machine."""
        try:
            async with asyncio.timeout(REACH_S):
                while True:
                    try:
                        return await getattr(self._agent, method).remote()
                    except (ActorUnavailableError, ActorDiedError):
                        await asyncio.sleep(RETRY_S)
        except (TimeoutError, RayError) as error:
            raise EngineDied(
                f"{self.name} has no location: Ray has not started its node agent for {REACH_S:g} s.",
                "It is tried again. `ray status` shows what the cluster lacks.",
                from_outside=True,
            ) from error


class RaySlots(Slots):
    """Slots on the machines of a Ray cluster; create it with `connect`."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self._groups: dict[PlacementGroup, list[RaySlot]] = {}
        self._numbers = itertools.count()
        self._prefix = f"tinsmith-{versions()['tinsmith']}-{uuid.uuid4().hex[:8]}"
        """Names of node agents hold the version: one of another version is never taken for this one's."""

    @classmethod
    async def connect(cls, address: str, identity: Identity | None = None) -> RaySlots:
        """Connect to a cluster, as HOST:PORT or `auto`; `identity` is for TLS. Raises ConfigError, with what to do."""
        await check_address(address)
        if not ray.is_initialized():
            await asyncio.to_thread(_connect, address)  # not in the main thread, where Ray would handle SIGTERM
            _take_signals_back()
        return cls(identity)

    @override
    async def machines(self) -> list[Machine]:
        nodes = await asyncio.to_thread(ray.nodes)
        placed = [slot.location.machine for slots in self._groups.values() for slot in slots]
        gpu_bytes = {machine.name: machine.gpu_bytes for machine in placed}
        alive = [_machine(node) for node in nodes if node["Alive"]]
        return [replace(machine, gpu_bytes=gpu_bytes.get(machine.name, 0)) for machine in alive]

    async def reserve_on_each(self) -> list[RaySlot]:
        """A slot on each machine that has a free core. Machines are checked."""
        nodes = sum(machine.cpus > 0 for machine in await self.machines())
        return await self._reserve(nodes, "node", {"CPU": 1}, "STRICT_SPREAD")

    @override
    async def reserve(self, count: int, *, name: str, gpus: int = 0, strategy: Strategy = "pack") -> Sequence[Slot]:
        bundle: dict[str, float] = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
        return await self._reserve(count, name, bundle, _STRATEGIES[strategy])

    async def _reserve(self, count: int, name: str, bundle: dict[str, float], strategy: str) -> list[RaySlot]:
        if count == 0:
            return []
        group = await asyncio.to_thread(placement_group, [bundle] * count, strategy=strategy)
        await _ready(group, f"{count} x {name}: {', '.join(f'{value:g} {key}' for key, value in bundle.items())}")
        slots = [self._keep(group, number, f"{name}-{number}", bundle) for number in range(count)]
        self._groups[group] = slots
        try:
            check_locations(await asyncio.gather(*(slot.locate() for slot in slots)))
        except BaseException:
            await self.give_back(list(slots))
            raise
        return slots

    @override
    async def give_back(self, slots: Sequence[Slot]) -> None:
        await asyncio.gather(*(slot.end() for slot in slots))
        for group, members in list(self._groups.items()):
            for slot in [member for member in members if member in slots]:
                slot.drop()
                members.remove(slot)
            if not members:
                del self._groups[group]
                await asyncio.to_thread(remove_placement_group, group)

    @override
    async def close(self) -> None:
        await self.give_back([slot for members in self._groups.values() for slot in members])

    def _keep(self, group: PlacementGroup, number: int, name: str, bundle: dict[str, float]) -> RaySlot:
        gpus = bundle.get("GPU", 0)
        options = {
            "name": f"{self._prefix}-{next(self._numbers)}-{name}",
            "num_cpus": AGENT_SHARE,
            "num_gpus": AGENT_SHARE if gpus == 1 else gpus,  # Ray knows fractions of one GPU only
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        }
        return RaySlot(name, ray.remote(RayNodeAgent).options(**options).remote(), self._identity)


def _connect(address: str) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)  # its warning that it does not handle SIGTERM, which is meant
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"There is no Ray cluster at {address}, or it refuses this process: {reason}",
            "Start one with `ray start --head`; versions of Ray and Python and RAY_AUTH_TOKEN must be the same.",
        ) from error


def _take_signals_back() -> None:
    """Undo Ray's handling of signals, which prints a stack trace for each before it passes it on."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))


async def _ready(group: PlacementGroup, wanted: str) -> None:
    """Wait until the cluster has room for a placement group, and say so while it has not."""
    ready = asyncio.ensure_future(_as_coroutine(group.ready()))
    try:
        while not (await asyncio.wait([ready], timeout=WAIT_LOG_S))[0]:
            log.warning("The cluster has no room for %s; waiting for machines.", wanted)
        await ready
    except BaseException:
        ready.cancel()
        await asyncio.to_thread(remove_placement_group, group)
        raise


async def _as_coroutine(reference: Any) -> Any:
    return await reference


def _is_lost(machine: str) -> bool:
    """Whether Ray counts a machine as dead."""
    try:
        nodes = ray.nodes()
    except (RayError, RuntimeError, OSError):  # nobody knows while the head is away
        return False
    return machine not in {_machine(node).name for node in nodes if node["Alive"]}


def _machine(node: dict[str, Any]) -> Machine:
    resources = node["Resources"]
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return Machine(
        name=machine_name(node["NodeManagerHostname"], node["NodeID"]),
        host=node["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        memory_bytes=int(resources.get("memory", 0)),
        gpus=tuple(kinds[:1] or ["GPU"]) * int(resources.get("GPU", 0)),
        versions={},
    )
