"""Work of a buffer in a thread of its own, piece after piece.

Who waits for a piece may be cancelled; the piece goes on all the same, and what is asked for later comes after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class InTurn:
    """One thread, begun with the first piece."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer")

    async def do(self, piece: Callable[[], T]) -> T:
        """Its result, when all that was asked for before is done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, piece)

    async def close(self) -> None:
        """Returns when all is done."""
        await asyncio.to_thread(self._thread.shutdown)
