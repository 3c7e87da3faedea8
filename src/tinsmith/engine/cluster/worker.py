"""The process of an engine: the program of `python -m tinsmith.engine.cluster.worker`."""

from __future__ import annotations

import asyncio

from tinsmith.engine.adapters.cached_engine import with_objects
from tinsmith.engine.build import build
from tinsmith.engine.processes.worker import open_link, serve


def main() -> None:
    """Entry point of the process."""
    link, payload = open_link()
    asyncio.run(serve(link, with_objects(build, payload)))


if __name__ == "__main__":
    main()
