"""A front end: `python -m tinsmith.service.frontends.process LISTENER CHANNEL SETTINGS`, started by the core.

LISTENER and CHANNEL are file descriptors: the listening socket of all front ends, and the socket to the core. A front
end keeps nothing that outlives a connection, and imports no database and no engine. When the core ends, every open
request is answered 503 and the process ends, so that the next core finds the port free.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from typing import Any

from typing_extensions import override

from tinsmith.service.frontends.channel import Channel, connect
from tinsmith.service.frontends.forwarder import Forwarder
from tinsmith.service.frontends.messages import (
    ConnectionClosed,
    ConnectionOpened,
    FrontendAlive,
    FrontendSettings,
    RefuseConnection,
    Stop,
)
from tinsmith.service.limits.connections import (
    AddressCounts,
    BoundedProtocol,
    Connections,
    Refusal,
)
from tinsmith.service.limits.http_server import BoundedServer
from tinsmith.service.limits.parsing import Parsers
from tinsmith.service.observability.logs import configure_logging

ALIVE_S = 5.0
"""Time between two signs of life."""
GRACE_S = 3
"""Time for open responses after the core has stopped or ended."""


class ReportedConnections(Connections):
    """The connections of this front end. The core counts those of all; it refuses one if an address has too many."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(AddressCounts(per_address=None), timeout_s)
        self.channel: Channel | None = None
        self._numbers: dict[BoundedProtocol, int] = {}
        self._by_number: dict[int, BoundedProtocol] = {}
        self._next = 0

    @override
    def add(self, connection: BoundedProtocol, address: str) -> Refusal | None:
        self._numbers[connection] = self._next
        self._by_number[self._next] = connection
        if self.channel is not None:
            self.channel.send(ConnectionOpened(self._next, address))
        self._next += 1
        return super().add(connection, address)

    @override
    def discard(self, connection: BoundedProtocol) -> None:
        super().discard(connection)
        number = self._numbers.pop(connection, None)
        if number is not None:
            del self._by_number[number]
            if self.channel is not None:
                self.channel.send(ConnectionClosed(number))

    def refuse(self, message: RefuseConnection) -> None:
        """Close a connection of an address that has too many."""
        connection = self._by_number.get(message.number)
        if connection is not None:
            connection.refuse(Refusal(status=message.status, detail=message.detail))


class _Server(BoundedServer):
    def stop(self) -> None:
        """Accept no more connections; end when the open responses have ended."""
        self.should_exit = True
        for server in self.servers if self.started else ():
            server.close()


async def run(listener: socket.socket, to_core: socket.socket, settings: FrontendSettings) -> None:
    """Serve until the core stops this front end, or ends."""
    parsers = Parsers()
    forwarder, connections = Forwarder(parsers), ReportedConnections(settings.request_timeout_s)
    server = _Server(forwarder, connections, GRACE_S)

    def receive(message: Any) -> None:
        if isinstance(message, RefuseConnection):
            connections.refuse(message)
        elif isinstance(message, Stop):
            server.stop()
        else:
            forwarder.receive(message)

    def end() -> None:
        forwarder.end()
        server.stop()

    channel = forwarder.channel = connections.channel = Channel(receive, end)
    await connect(channel, to_core)
    alive = asyncio.create_task(_send_signs_of_life(channel))
    await server.serve(sockets=[listener])
    alive.cancel()
    channel.close()
    await asyncio.to_thread(parsers.close)


async def _send_signs_of_life(channel: Channel) -> None:
    while True:
        channel.send(FrontendAlive())
        await asyncio.sleep(ALIVE_S)


def main() -> None:
    """Entry point of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the core, which finishes what runs and then stops this
        signal.signal(number, signal.SIG_IGN)
    listener, to_core = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    settings = FrontendSettings(*json.loads(sys.argv[3]))
    configure_logging(settings.log_format, settings.log_level)
    asyncio.run(run(listener, to_core, settings))


if __name__ == "__main__":
    main()
