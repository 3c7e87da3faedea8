"""Programs that begin with their imports made: forks of a child process that has imported what they need.

A program of this package imports for seconds before it begins. Many of one kind, such as the runs of a sweep, are
started here instead of by `tinsmith.processes.start`. On Linux: elsewhere, libraries of the system do not survive a
fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

from tinsmith.errors import TinsmithError
from tinsmith.processes.fork_server import LENGTH_BYTES, STATUS_BYTES
from tinsmith.processes.start import ConnectedChild


class ForkServer:
    """The child process that imports and forks (`tinsmith.processes.fork_server`).

    Example: ForkServer("package.module:preload").start("package.module:main", "--quick", log=2).poll()
    """

    def __init__(self, preload: str) -> None:
        """`preload`: the function that imports, as module:function; it may start no thread. Does not wait for it."""
        self._child = ConnectedChild("tinsmith.processes.fork_server", preload, log=sys.stderr.fileno())
        self._is_ready = False

    def start(
        self, function: str, *arguments: str, environment: Mapping[str, str] | None = None, log: int
    ) -> ForkedChild:
        """Start a program, which is a function without parameters; its arguments are in sys.argv.

        `environment`: variables beside those of this process. `log`: descriptor of standard output and standard error.
        Standard input is a pipe that only this process holds open. The program leads a session of its own, and is
        killed when the thread that made this object ends. Raises TinsmithError if the fork server has ended.
        """
        reading, writing = os.pipe()
        ours, theirs = socket.socketpair()
        words = [function, *arguments]
        request = repr((words, os.getcwd(), {**os.environ, **(environment or {})}, [0, 1, 2])).encode()
        child = ForkedChild(ours, writing)
        try:
            self._wait_until_ready()
            socket.send_fds(self._child.connection, [b"p"], [theirs.fileno()])
            socket.send_fds(ours, [len(request).to_bytes(LENGTH_BYTES, "little")], [reading, log, log])
            ours.sendall(request)
            ours.setblocking(False)
        except OSError as error:
            child.close()
            raise TinsmithError(
                "The process that starts others has ended.", "What it printed above says why."
            ) from error
        finally:
            theirs.close()
            os.close(reading)
        return child

    def close(self) -> None:
        """End it and its programs."""
        self._child.close()

    def _wait_until_ready(self) -> None:
        """Raises OSError if it has ended."""
        if not self._is_ready and not self._child.connection.recv(1):
            raise BrokenPipeError
        self._is_ready = True


class ForkedChild:
    """A program that a fork server has started."""

    def __init__(self, link: socket.socket, stdin: int) -> None:
        self._link, self._stdin = link, stdin
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, -N if signal N ended it; None while it runs."""
        if self._code is None:
            with suppress(BlockingIOError):
                self._code = self._status()
                self.close()
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(OSError):  # it ended meanwhile
                self._link.send(bytes([number]))

    def _status(self) -> int:
        """The exit code that is sent when it has ended; that of SIGKILL if the fork server is gone, and with it all."""
        try:
            data = self._link.recv(STATUS_BYTES)
        except ConnectionError:
            data = b""
        return int.from_bytes(data, "little", signed=True) if data else -signal.SIGKILL

    def close(self) -> None:
        """Close what connects this process with the program, which is killed if it still runs."""
        self._link.close()
        os.close(self._stdin)
