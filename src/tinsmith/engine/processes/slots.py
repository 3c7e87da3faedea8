"""Slots: each runs one process at a time on a machine, with GPUs of its own.

`Slots` gives slots, a `Slot` starts processes, and a `SlotProcess` is one of them: how to connect to it, and when it
ended. `LocalSlots` are the slots of this machine, without Ray; `ray_slots` has those of a Ray cluster. A process that
is started runs a module (`entry`) whose first call is `worker.open_link`, and ends with its starter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar

from typing_extensions import override

from tinsmith.engine.processes.dial import PING_S, Address, LaunchToken, dial, encode_launch_token, read_report
from tinsmith.engine.processes.machine import Machine, this_machine, visible_gpus
from tinsmith.engine.processes.tls import Identity
from tinsmith.errors import ConfigError, EngineDied
from tinsmith.plurals import counted
from tinsmith.processes.start import start_watched_child

P = ParamSpec("P")
R = TypeVar("R")
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

WAITING_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000"}
"""OpenMP threads that wait for each other spin 5,000 times, about a tenth of a millisecond, and then sleep. If they
sleep at once, a second thread gains nothing in decoding, whose operations are short; by default they spin without end,
which made decoding 6 to 10 times slower when another process (a training loop, a browser) kept as many cores busy
(benchmarks/NOTES.md)."""
CHILD_ENVIRONMENT = {**WAITING_THREADS, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Memory of a GPU is in segments that grow, because each pass has another size and would leave gaps in fixed ones."""
START_S = 60.0
"""Time for a process to report its port: Python starts, and imports the module."""
LOOPBACK = "127.0.0.1"

Strategy = Literal["pack", "strict_pack", "scatter"]
"""Slots on as few machines as possible, on one machine, or on as many as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program for a slot."""

    module: str
    """Run as `python -m tinsmith.processes.entry MODULE`."""
    payload: bytes = b""
    """Data that it finds in its launch token."""
    environment: Mapping[str, str] = field(default_factory=lambda: {"TQDM_DISABLE": "1"})
    """Progress bars of several processes would write over each other in one log."""


class SlotProcess(Protocol):
    """A process in a slot: a child of this one, or one on another machine."""

    died: asyncio.Event
    """Set when it has ended, or counts as ended because its machine is gone."""
    ping_s: float
    """Time between two pings that it waits for; 0 if its connection needs none."""

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal if a signal ended it; None while it runs, or if nobody knows."""
        ...

    def kill(self) -> None:
        """Begin to kill it with all processes that it started, also if it is stopped."""
        ...

    async def connect(self, buffer: int) -> Connection:
        """Connect to it, once. `buffer`: bytes that are read ahead. Raises EngineDied if it cannot be reached."""
        ...

    async def end(self) -> None:
        """Kill it and wait until it is confirmed that it is gone."""
        ...


class Slot(Protocol):
    """Runs one process at a time on a machine, with its GPUs."""

    name: str
    """Such as `trainer-0`; unique among the slots of a base model."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """CUDA_VISIBLE_DEVICES of its processes; empty for a process without GPU."""
        ...

    @property
    def machine(self) -> str:
        """Identity of its machine. A slot of a cluster may move when its machine is lost."""
        ...

    @property
    def host(self) -> str:
        """Address of its machine for the other machines."""
        ...

    @property
    def process(self) -> SlotProcess | None:
        """The process that was started last."""
        ...

    async def start(self, program: Program, generation: int) -> SlotProcess:
        """Start a process. The process of an earlier start is ended first.

        Raises EngineDied if it ends before it can be connected to, or if the slot's machine is gone.
        """
        ...

    async def has_machine(self) -> bool:
        """Whether it has a machine; that of a slot which has lost its own may take a moment to be found."""
        ...

    async def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """The result of a function, called in a thread on its machine. The function must be importable by name."""
        ...

    async def log_tail(self, lines: int) -> str:
        """The last lines that its processes wrote; empty where they write to the log of the service."""
        ...

    async def end(self) -> None:
        """End its process. Returns once it is confirmed that the process is gone."""
        ...


class Slots(Protocol):
    """Gives slots on the machines that a service may use."""

    async def machines(self) -> list[Machine]:
        """The machines."""
        ...

    async def reserve(self, count: int, *, name: str, gpus: int = 0, strategy: Strategy = "pack") -> Sequence[Slot]:
        """Reserve slots NAME-0, NAME-1, …, each with `gpus` GPUs. Waits while the cluster has too few free ones.

        Raises ConfigError if the machines cannot have that many; a cluster may get more machines, so it waits then.
        """
        ...

    async def give_back(self, slots: Sequence[Slot]) -> None:
        """End the processes of slots and free the slots."""
        ...

    async def close(self) -> None:
        """End all processes and free all slots."""
        ...


class ChildProcess:
    """A child of this process in a slot, which leads its session. Implements SlotProcess."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        connect: Callable[[int], Awaitable[Connection]],
        *,
        ping_s: float = 0.0,
    ) -> None:
        self.died = asyncio.Event()
        self.ping_s = ping_s
        self._child, self._connect = child, connect
        self._watch = asyncio.create_task(self._wait())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def code(self) -> int | None:
        return self._child.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    async def connect(self, buffer: int) -> Connection:
        return await self._connect(buffer)

    async def end(self) -> None:
        if not self.died.is_set():
            self.kill()
        await asyncio.shield(self._watch)

    async def _wait(self) -> None:
        await self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self.died.set()


class LocalSlot:
    """A slot of this machine. Implements Slot."""

    def __init__(
        self, name: str, gpus: tuple[str, ...] = (), identity: Identity | None = None, *, over_tcp: bool = False
    ) -> None:
        """`identity`: of the service, for TLS. Without it, processes inherit a connected socket unless `over_tcp`."""
        self.name = name
        self.gpus = gpus
        self.machine = socket.gethostname()
        self.host = LOOPBACK
        self.process: ChildProcess | None = None
        self._identity = identity
        self._over_tcp = over_tcp or identity is not None

    async def start(self, program: Program, generation: int) -> ChildProcess:
        await self.end()
        launch_token = LaunchToken.new(generation, self.host, program.payload, self._identity)
        if self._over_tcp:
            child, address = await start_listening(program, launch_token, self.gpus)
            connect = partial(dial, address, launch_token, self._identity)
            self.process = ChildProcess(child, connect, ping_s=PING_S)
        else:
            ours, theirs = socket.socketpair()
            with theirs:
                child = await start_program(program, launch_token, self.gpus, inherited=theirs)
            self.process = ChildProcess(child, partial(_open, ours))
        return self.process

    async def has_machine(self) -> bool:
        return True

    async def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(function, *args, **options)

    async def log_tail(self, lines: int) -> str:
        return ""

    async def end(self) -> None:
        if self.process is not None:
            await self.process.end()


class LocalSlots(Slots):
    """Slots on this machine, without Ray."""

    def __init__(self, identity: Identity | None = None) -> None:
        """As of `LocalSlot`."""
        self._identity = identity
        self._free_gpus: list[str] | None = None
        self._reserved: list[LocalSlot] = []

    @override
    async def machines(self) -> list[Machine]:
        return [await asyncio.to_thread(this_machine)]

    @override
    async def reserve(self, count: int, *, name: str, gpus: int = 0, strategy: Strategy = "pack") -> Sequence[Slot]:
        if self._free_gpus is None:
            self._free_gpus = await asyncio.to_thread(visible_gpus)
        free = self._free_gpus
        if count * gpus > len(free):
            raise ConfigError(
                f"{name} is to have {counted(count, 'process')} with {counted(gpus, 'GPU')} each; this machine has "
                f"{counted(len(free), 'free GPU')}.",
                "Use fewer processes, or machines of a Ray cluster: --cluster.",
            )
        slots = []
        for number in range(count):
            devices, free[:gpus] = tuple(free[:gpus]), []
            slots.append(LocalSlot(f"{name}-{number}", devices, self._identity))
        self._reserved += slots
        return list(slots)

    @override
    async def give_back(self, slots: Sequence[Slot]) -> None:
        await asyncio.gather(*(slot.end() for slot in slots))
        for slot in slots:
            if slot in self._reserved and self._free_gpus is not None:
                self._reserved.remove(slot)  # type: ignore[arg-type]
                self._free_gpus += slot.gpus

    @override
    async def close(self) -> None:
        await self.give_back(list(self._reserved))


async def start_program(
    program: Program,
    launch_token: LaunchToken,
    gpus: tuple[str, ...],
    *,
    log: int | None = None,
    folder: str = ".",
    inherited: socket.socket | None = None,
) -> asyncio.subprocess.Process:
    """Start a child of this process.

    `log`: descriptor of its standard error. `folder`: its working folder, if this machine has it. `inherited`: its end
    of a connection; without one it listens.
    """
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    descriptors = () if inherited is None else (inherited.fileno(),)
    child = await start_watched_child(
        program.module,
        environment={**CHILD_ENVIRONMENT, **os.environ, **program.environment, **devices},
        log=log,
        report=inherited is None,
        inherited=descriptors,
        folder=folder if Path(folder).is_dir() else None,
    )
    assert child.stdin is not None
    if descriptors:
        launch_token = replace(launch_token, descriptor=descriptors[0])
    try:
        with contextlib.suppress(OSError):  # it has ended: whoever reads its report or its connection sees that
            child.stdin.write(encode_launch_token(launch_token))
            async with asyncio.timeout(START_S):
                await child.stdin.drain()
    except BaseException:
        await _end(child)
        raise
    return child


async def start_listening(
    program: Program, launch_token: LaunchToken, gpus: tuple[str, ...], log: int | None = None, folder: str = "."
) -> tuple[asyncio.subprocess.Process, Address]:
    """Start a child of this process and wait until it listens. Raises EngineDied if it ends before."""
    child = await start_program(program, launch_token, gpus, log=log, folder=folder)
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            port, certificate = await read_report(child.stdout)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        await _end(child)
        reason = f"within {START_S:g} s" if isinstance(error, TimeoutError) else f"(exit status {child.returncode})"
        raise EngineDied(f"{program.module} did not start {reason}.", "Its log has the reason.") from error
    except BaseException:
        await _end(child)
        raise
    return child, Address(launch_token.host, port, certificate)


def free_port(host: str) -> int:
    """A TCP port of this machine that is free now."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def read_file(path: Path, limit: int) -> bytes | None:
    """The first bytes of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return None


async def _open(connection: socket.socket, buffer: int) -> Connection:
    return await asyncio.open_connection(sock=connection, limit=buffer)


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
