"""Places of processes: seats on machines, each with its GPUs, in which one process runs at a time.

`Places` gives seats, a `Seat` starts processes, and a `PlacedProcess` is one of them: where it listens, and when it
ended. `Subprocesses` are the seats of this machine, without Ray; `machines.ray_places` has those of a Ray cluster. A
process that is started runs a module (`entry`) whose first call is `dial.Entrance.open()`, and ends with its starter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from typing_extensions import override

from tinsmith.engine.child_process import CHILD_ENVIRONMENT, ChildProcess, EngineProcess
from tinsmith.engine.cluster.dial import Address, Ticket, read_report, written_ticket
from tinsmith.engine.cluster.machines.machine import Machine, this_machine, visible_gpus
from tinsmith.engine.cluster.tls import Identity
from tinsmith.errors import ConfigError, EngineDied
from tinsmith.plurals import counted

START_S = 60.0
"""Time for a process to report its port: Python starts, and imports the module."""
LOOPBACK = "127.0.0.1"

_NO_BARS = {"TQDM_DISABLE": "1"}
"""Progress bars of several processes would write over each other in one log."""

Strategy = Literal["pack", "strict_pack", "scatter"]
"""Seats on as few machines as possible, on one machine, or on as many as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program for a seat."""

    module: str
    """Run as `python -m tinsmith.engine.cluster.entry MODULE`."""
    payload: bytes = b""
    """Data that it finds in its ticket."""
    environment: Mapping[str, str] = field(default_factory=dict)


class PlacedProcess(EngineProcess, Protocol):
    """A process in a seat. `died` is set too when it counts as ended because its machine is gone."""

    address: Address
    ticket: Ticket

    async def end(self) -> None:
        """Kill it and wait until it is confirmed that it is gone."""
        ...


class Seat(Protocol):
    """A place for one process at a time."""

    name: str
    """Such as `trainer-0`; unique among the seats of a base model."""
    identity: Identity | None
    """With which the service connects to its processes by TLS; None without TLS."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """CUDA_VISIBLE_DEVICES of its processes; empty for a process without GPU."""
        ...

    @property
    def machine(self) -> str:
        """Identity of its machine. A seat of a cluster may move when its machine is lost."""
        ...

    @property
    def host(self) -> str:
        """Address of its machine for the other machines."""
        ...

    @property
    def process(self) -> PlacedProcess | None:
        """The process that was started last."""
        ...

    async def start(self, program: Program, generation: int) -> PlacedProcess:
        """Start a process and wait until it listens. The process of an earlier start is ended first.

        Raises EngineDied if it ends before, or if the seat's machine is gone.
        """
        ...

    async def has_place(self) -> bool:
        """Whether it has a machine; that of a seat which has lost its own may take a moment to be found."""
        ...

    async def free_port(self) -> int:
        """A free TCP port of its machine."""
        ...

    async def read(self, path: Path, limit: int) -> bytes | None:
        """The first bytes of a file as its machine sees it; None if there is none."""
        ...

    async def check_store(self, url: str) -> str:
        """Why its machine cannot use an object store; empty if it can."""
        ...

    async def log_tail(self, lines: int) -> str:
        """The last lines that its processes wrote; empty where they write to the log of the service."""
        ...

    async def end(self) -> None:
        """End its process. Returns once it is confirmed that the process is gone."""
        ...


class Places(Protocol):
    """Gives seats on the machines that a service may use."""

    async def machines(self) -> list[Machine]:
        """The machines."""
        ...

    async def seats(self, count: int, *, name: str, gpus: int = 0, strategy: Strategy = "pack") -> Sequence[Seat]:
        """Reserve seats NAME-0, NAME-1, …, each with `gpus` GPUs. Waits while the cluster has too few free ones.

        Raises ConfigError if the machines cannot have that many; a cluster may get more machines, so it waits then.
        """
        ...

    async def give_back(self, seats: Sequence[Seat]) -> None:
        """End the processes of seats and free the seats."""
        ...

    async def close(self) -> None:
        """End all processes and free all seats."""
        ...


class Subprocess(ChildProcess):
    """A child process in a seat. Implements PlacedProcess."""

    def __init__(self, child: asyncio.subprocess.Process, address: Address, ticket: Ticket) -> None:
        super().__init__(child)
        self.address = address
        self.ticket = ticket


class SubprocessSeat:
    """A seat of this machine. Implements Seat."""

    def __init__(self, name: str, gpus: tuple[str, ...], identity: Identity | None = None) -> None:
        self.name = name
        self.identity = identity
        self.gpus = gpus
        self.machine = socket.gethostname()
        self.host = LOOPBACK
        self.process: Subprocess | None = None

    async def start(self, program: Program, generation: int) -> Subprocess:
        await self.end()
        ticket = Ticket.new(generation, self.host, program.payload, self.identity)
        child, port, certificate = await start_child(program, ticket, self.gpus)
        self.process = Subprocess(child, Address(self.host, port, certificate), ticket)
        return self.process

    async def has_place(self) -> bool:
        return True

    async def free_port(self) -> int:
        return free_port(self.host)

    async def read(self, path: Path, limit: int) -> bytes | None:
        return read_file(path, limit)

    async def check_store(self, url: str) -> str:
        return await asyncio.to_thread(fault_of_store, url)

    async def log_tail(self, lines: int) -> str:
        return ""

    async def end(self) -> None:
        if self.process is not None:
            await self.process.end()


class Subprocesses(Places):
    """Seats on this machine, without Ray."""

    def __init__(self, identity: Identity | None = None) -> None:
        """`identity`: of the service, for TLS."""
        self._identity = identity
        self._free_gpus: list[str] | None = None
        self._seats: list[SubprocessSeat] = []

    @override
    async def machines(self) -> list[Machine]:
        return [await asyncio.to_thread(this_machine)]

    @override
    async def seats(self, count: int, *, name: str, gpus: int = 0, strategy: Strategy = "pack") -> Sequence[Seat]:
        if self._free_gpus is None:
            self._free_gpus = await asyncio.to_thread(visible_gpus)
        free = self._free_gpus
        if count * gpus > len(free):
            raise ConfigError(
                f"{name} is to have {counted(count, 'process')} with {counted(gpus, 'GPU')} each; this machine has "
                f"{counted(len(free), 'free GPU')}.",
                "Use fewer processes, or machines of a Ray cluster: --cluster.",
            )
        seats = []
        for number in range(count):
            devices, free[:gpus] = tuple(free[:gpus]), []
            seats.append(SubprocessSeat(f"{name}-{number}", devices, self._identity))
        self._seats += seats
        return list(seats)

    @override
    async def give_back(self, seats: Sequence[Seat]) -> None:
        await asyncio.gather(*(seat.end() for seat in seats))
        for seat in seats:
            if seat in self._seats and self._free_gpus is not None:
                self._seats.remove(seat)  # type: ignore[arg-type]
                self._free_gpus += seat.gpus

    @override
    async def close(self) -> None:
        await self.give_back(list(self._seats))


async def start_child(
    program: Program, ticket: Ticket, gpus: tuple[str, ...], log: int | None = None, folder: str = "."
) -> tuple[asyncio.subprocess.Process, int, bytes]:
    """Start a child of this process and wait for its port and certificate. `log`: descriptor of its standard error.
    `folder`: its working folder, if this machine has it.

    Raises EngineDied if it ends before.
    """
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinsmith.engine.cluster.entry", program.module),
        stdin=subprocess.PIPE,  # stays open: the child ends when it closes
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        cwd=folder if Path(folder).is_dir() else None,
        env={**CHILD_ENVIRONMENT, **_NO_BARS, **os.environ, **program.environment, **devices},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(written_ticket(ticket))
        async with asyncio.timeout(START_S):
            await child.stdin.drain()
            port, certificate = await read_report(child.stdout)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        await _end(child)
        reason = f"within {START_S:g} s" if isinstance(error, TimeoutError) else f"(exit status {child.returncode})"
        raise EngineDied(f"{program.module} did not start {reason}.", "Its log has the reason.") from error
    except BaseException:
        await _end(child)
        raise
    return child, port, certificate


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


def fault_of_store(url: str) -> str:
    """Why this machine cannot use an object store; empty if it can."""
    from tinsmith.engine.cluster.objects import ObjectStore  # with fsspec

    try:
        ObjectStore(url).check()
    except ConfigError as error:
        return str(error)
    return ""


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
