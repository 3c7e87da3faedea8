"""The node agent of a slot on another machine: starts a process there, waits for its end, and ends it.

A node agent runs under the daemon of its machine, which its parent process is. When the daemon ends, the node agent
ends its process and itself: the daemon's own clean-up does not happen if it is killed, and a process left over would
keep its GPU. The process in turn ends with its node agent. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.engine.processes.dial import Address, LaunchToken
from tinsmith.engine.processes.machine import Machine, this_machine
from tinsmith.engine.processes.slots import Program, start_listening
from tinsmith.errors import EngineDied, TinsmithError
from tinsmith.processes.parent import watch_parent

LOG_LINES = 20
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLocation:
    """Where a node agent is, and what its processes find there."""

    machine: Machine
    gpus: tuple[str, ...]
    requires_token: bool
    """Whether its cluster accepts only callers with the cluster's token."""


class NodeAgent:
    """Keeps one process at a time."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._log = Path(tempfile.mkdtemp(prefix="tinsmith-node-agent-")) / "process.log"
        watch_parent(self._end_all)

    async def start(
        self, program: Program, launch_token: LaunchToken, folder: str
    ) -> tuple[int, Address] | TinsmithError:
        """Start a process, wait until it listens, and return its id and address; the earlier one is ended first.
        Returns the error of a failure.

        `folder`: where the service runs. The process runs there too, if this machine has that folder, so that relative
        paths in the settings mean the same.
        """
        await self.end()
        try:
            with self._log.open("ab") as log:
                self._child, address = await start_listening(program, launch_token, (), log.fileno(), folder)
        except EngineDied as error:
            return EngineDied(f"{error.message}\n{self.log_tail(LOG_LINES)}")
        return self._child.pid, address

    async def ended(self, pid: int) -> int | None:
        """Wait until a process has ended; its exit code, or None for one that this node agent does not know."""
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

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a function, in a thread."""
        return await asyncio.to_thread(function, *args, **options)

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
        """Send bytes to a node agent that receives; the seconds until it has them."""
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for _ in range(0, size, PIECE_BYTES):
            writer.write(bytes(PIECE_BYTES))
            await writer.drain()
        writer.write_eof()
        await reader.read()
        writer.close()
        return time.perf_counter() - began

    def describe(self, name: str, host: str) -> SlotLocation:
        """Its location. `name` and `host` are those of its machine in the cluster."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return SlotLocation(
            machine=this_machine(name, host),
            gpus=tuple(device for device in gpus.split(",") if device),
            requires_token=os.environ.get("RAY_AUTH_MODE") == "token",
        )

    def _kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        self._kill()
        os._exit(1)
