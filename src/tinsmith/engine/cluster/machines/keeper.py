"""The keeper of a seat on another machine: starts a process there, waits for its end, and ends it.

A keeper runs under the daemon of its machine, which its parent process is. When the daemon ends, the keeper ends its
process and itself: the daemon's own clean-up does not happen if it is killed, and a process left over would keep its
GPU. The process in turn ends with its keeper. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.cluster.dial import PARENT_POLL_S, Address, Ticket
from tinsmith.engine.cluster.machines.machine import Machine, this_machine
from tinsmith.engine.cluster.placement import Program, fault_of_store, free_port, read_file, start_child
from tinsmith.errors import EngineDied, TinsmithError

LOG_LINES = 20
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a keeper is, and what its processes find there."""

    machine: Machine
    gpus: tuple[str, ...]
    requires_token: bool
    """Whether its cluster accepts only callers with the cluster's token."""
    keeper: str
    """Identity of this keeper: one that was started again is another."""


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process that listens."""

    pid: int
    port: int
    certificate: bytes
    """For TLS; else empty."""


class Keeper:
    """Keeps one process at a time."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._child: asyncio.subprocess.Process | None = None
        self._log = Path(tempfile.mkdtemp(prefix="tinsmith-keeper-")) / "process.log"
        self._identity = f"{os.getpid()}-{time.time_ns()}"
        threading.Thread(target=self._end_with_parent, name="parent-watch", daemon=True).start()

    async def start(self, program: Program, ticket: Ticket, folder: str) -> StartedProcess | TinsmithError:
        """Start a process and wait until it listens; the earlier one is ended first. Returns the error of a failure.

        `folder`: where the service runs. The process runs there too, if this machine has that folder, so that relative
        paths in the settings mean the same.
        """
        await self.end()
        try:
            with self._log.open("ab") as log:
                self._child, port, certificate = await start_child(program, ticket, (), log.fileno(), folder)
        except EngineDied as error:
            return EngineDied(f"{error.message}\n{self.log_tail(LOG_LINES)}")
        return StartedProcess(self._child.pid, port, certificate)

    async def ended(self, pid: int) -> int | None:
        """Wait until a process has ended; its exit code, or None for one that this keeper does not know."""
        if self._child is None or self._child.pid != pid:
            return None
        return await self._child.wait()

    async def end(self, pid: int = 0) -> None:
        """End the process, or only the one of this id, and wait until it is gone."""
        if self._child is not None and pid in (0, self._child.pid):
            self._kill()
            await self._child.wait()

    def log_tail(self, lines: int) -> str:
        """The last lines that the processes wrote."""
        with suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def free_port(self, host: str) -> int:
        """A free TCP port."""
        return free_port(host)

    def read(self, path: Path, limit: int) -> bytes | None:
        """The first bytes of a file; None if this machine does not see it."""
        return read_file(path, limit)

    async def check_store(self, url: str) -> str:
        """Why this machine cannot use an object store; empty if it can."""
        return await asyncio.to_thread(fault_of_store, url)

    async def receive(self, host: str) -> int:
        """Take one connection on a new port and read it to its end, to measure the network. Returns the port."""

        async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.close()
            while await reader.read(PIECE_BYTES):
                pass
            writer.write(b".")
            writer.close()

        server = await asyncio.start_server(read, host, 0, limit=PIECE_BYTES)
        return server.sockets[0].getsockname()[1]

    async def send(self, address: Address, size: int) -> float:
        """Send bytes to a keeper that receives; the seconds until it has them."""
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for _ in range(0, size, PIECE_BYTES):
            writer.write(bytes(PIECE_BYTES))
            await writer.drain()
        writer.write_eof()
        await reader.read()
        writer.close()
        return time.perf_counter() - began

    def describe(self, name: str, host: str) -> Place:
        """Its place. `name` and `host` are those of its machine in the cluster."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Place(
            machine=this_machine(name, host),
            gpus=tuple(device for device in gpus.split(",") if device),
            requires_token=os.environ.get("RAY_AUTH_MODE") == "token",
            keeper=self._identity,
        )

    def _kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _end_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(PARENT_POLL_S)
        self._kill()
        os._exit(1)
