"""What the requests of a run wait for while its server serves other tenants, in the log and on the terminal.

The SDK passes on the place in the queue that polls carry only while the server is paused, and polls of samples carry
none. A Tinsmith server says what a session waits for; other servers get one request for it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

FIRST_SECONDS = 10.0
"""Wait from which it is logged."""
MOST_SECONDS = 300.0
"""Longest time between two lines while the run waits."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class QueueNotice:
    """The waits of one session. Lines come at growing distances; after a while without a wait, at short ones again."""

    session_id: str
    api_key: str
    _is_supported: bool = field(default=True, init=False)
    _distance: float = field(default=2 * FIRST_SECONDS, init=False)
    _next: float = field(default=0.0, init=False)
    """When the next line may come, by the clock of the event loop."""

    async def look(self, client: httpx.AsyncClient, url: str) -> None:
        """Fetch and log what the session waits for."""
        if not self._is_supported:
            return
        with suppress(
            httpx.HTTPError, OSError, ValueError, LookupError, TypeError
        ):  # the health check says what is wrong
            path = f"{url}/api/v1/sessions/{self.session_id}/queue"
            response = await client.get(path, headers={"X-API-Key": self.api_key})
            if response.is_client_error:  # another server, or a session that has ended
                self._is_supported = False
            elif response.is_success:
                self._log_longest(response.json()["waits"])

    def _log_longest(self, waits: list[dict[str, Any]]) -> None:
        now = asyncio.get_running_loop().time()
        longest = max(waits, key=lambda wait: wait["waited_s"], default={"waited_s": 0.0})
        if longest["waited_s"] < FIRST_SECONDS:
            if now >= self._next + self._distance:
                self._distance = 2 * FIRST_SECONDS
            return
        if now < self._next:
            return
        minutes, seconds = divmod(round(longest["waited_s"]), 60)
        log.warning(
            "Waiting for the server for %d:%02d min: %s, %s", minutes, seconds, longest["queue"], longest["reason"]
        )
        self._next, self._distance = now + self._distance, min(2 * self._distance, MOST_SECONDS)
