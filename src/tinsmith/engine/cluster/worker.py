"""An engine in a seat: the program of `python -m tinsmith.engine.cluster.worker`, and its start by the service.

It is `engine.process` on a TCP connection. Ranks of a trainer group run a program of their own, which is reached in
the same way.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tinsmith.engine.cluster.dial import PING_S, Entrance, dial
from tinsmith.engine.cluster.placement import Program, Seat
from tinsmith.engine.process import ParentLink, serve
from tinsmith.engine.remote import BUFFER_BYTES, RemoteEngine

WORKER = Program(module="tinsmith.engine.cluster.worker")


async def start_engine(
    seat: Seat, config: Any, source: str, generation: int, program: Program = WORKER
) -> RemoteEngine:
    """Start a program in a seat, send it the settings of its engine and wait until its model is loaded.

    `source` names the model in errors. Raises the error that loading raised, or EngineDied.
    """
    process = await seat.start(program, generation)
    try:
        reader, writer = await dial(process.address, process.ticket, buffer=BUFFER_BYTES)
        return await RemoteEngine.over(process, reader, writer, config, source, ping_s=PING_S)
    except BaseException:
        process.kill()
        raise


def main() -> None:
    """Entry point of the process."""
    entrance = Entrance.open()
    asyncio.run(serve(ParentLink(entrance.accept())))


if __name__ == "__main__":
    main()
