"""Notifications to systemd, for a unit with Type=notify and WatchdogSec; without systemd, nothing is sent.

The event loop sends WATCHDOG=1 itself: if the loop stands still, systemd restarts the unit. A stalled engine is the
service's own business.
"""

from __future__ import annotations

import asyncio
import os
import socket

READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"


class Notifier:
    """The socket that systemd names in the environment."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._watchdog_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6

    def send(self, state: str) -> None:
        """Send a state. An address that begins with @ is abstract."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to_systemd:
            to_systemd.connect(self._address.replace("@", "\0", 1) if self._address[0] == "@" else self._address)
            to_systemd.send(state.encode())

    async def run(self) -> None:
        """Forever: report that the event loop runs, twice as often as systemd expects."""
        while self._address and self._watchdog_s:
            self.send(WATCHDOG)
            await asyncio.sleep(self._watchdog_s / 2)
