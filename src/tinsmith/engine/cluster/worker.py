"""An engine in a seat: the program of `python -m tinsmith.engine.cluster.worker`, and its start by the service.

It is `engine.process` on a TCP connection. Ranks of a trainer group run a program of their own, which is reached in
the same way.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tinsmith.engine.cluster.dial import PING_S, Entrance, dial
from tinsmith.engine.cluster.files.cached_engine import with_objects
from tinsmith.engine.cluster.placement import Program, Seat
from tinsmith.engine.process import ParentLink, build, serve
from tinsmith.engine.remote import BUFFER_BYTES, RemoteEngine

WORKER = Program(module="tinsmith.engine.cluster.worker")


async def start_engine(
    seat: Seat, config: Any, source: str, generation: int, program: Program = WORKER, payload: bytes = b""
) -> RemoteEngine:
    """Start a program in a seat, send it the settings of its engine and wait until its model is loaded.

    `source` names the model in errors; `payload` is for the ticket. Raises the error of loading, or EngineDied.
    """
    process = await seat.start(replace(program, payload=payload), generation)
    try:
        reader, writer = await dial(process.address, process.ticket, seat.identity, buffer=BUFFER_BYTES)
        return await RemoteEngine.over(process, reader, writer, config, source, ping_s=PING_S)
    except BaseException:
        process.kill()
        raise


def main() -> None:
    """Entry point of the process."""
    entrance = Entrance.open()
    load = with_objects(build, entrance.ticket.payload)
    asyncio.run(serve(ParentLink(entrance.accept()), load))


if __name__ == "__main__":
    main()
