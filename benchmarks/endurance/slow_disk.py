"""The service on a disk that takes longer to sync: each commit sleeps for the milliseconds in TINSMITH_SYNC_MS.

`python -m benchmarks.endurance.slow_disk` takes its settings as `tinsmith.service.embedded` does. The sleep is in
addition to the real sync, and in its place: in the thread of the store's writes.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine

from tinsmith.service import embedded
from tinsmith.service.storage import store

SYNC_MS = "TINSMITH_SYNC_MS"
COMMITS = "TINSMITH_COMMITS"
"""File that gets the number of commits at the end."""


def main() -> int:
    """Entry point of the server process."""
    seconds, commits = float(os.environ[SYNC_MS]) / 1000, 0
    open_sync_engine = store.sync_engine_of

    def open_slow_engine(engine: AsyncEngine) -> Engine:
        sync_engine = open_sync_engine(engine)

        def sync(_db: Any) -> None:
            nonlocal commits
            commits += 1
            time.sleep(seconds)

        event.listen(sync_engine, "commit", sync)
        return sync_engine

    store.sync_engine_of = open_slow_engine
    try:
        return embedded.main()
    finally:
        with open(os.environ[COMMITS], "w") as file:
            file.write(str(commits))


if __name__ == "__main__":
    sys.exit(main())
