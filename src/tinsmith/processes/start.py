"""Starts child processes that run a module of this package, and end with this process.

Each leads a session of its own: Ctrl-C reaches only this process, which ends its children. Its standard input is a pipe
that only this process holds open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

EXIT_S = 5.0
"""Time for the exit status of a child whose connection has closed."""


def start_child(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    log: int | None = None,
    report: bool = False,
    inherited: Sequence[int] = (),
    ends_itself: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`.

    `environment`: variables beside those of this process. `log`: descriptor of standard output and standard error;
    those of this process if None. `report`: whether standard output is a pipe to this process instead. `inherited`:
    descriptors that the child keeps. `ends_itself`: the child watches this process by itself, to end in order;
    otherwise the system kills it when the thread that called this function ends.
    """
    command, options = _options(module, arguments, environment, log, report, inherited, ends_itself)
    return subprocess.Popen(command, **options)  # type: ignore[return-value]  # in bytes, without `text`


def start_confined(command: Sequence[str], limits: str) -> subprocess.Popen[bytes]:
    """Start a command that is not trusted, through `tinsmith.processes.confine`, with pipes to it.

    `limits`: those of that module, in JSON. The system kills the command when the thread that called this function
    ends. The command inherits no variable of this process.
    """
    module = [sys.executable, "-m", "tinsmith.processes.confine", limits]
    return _with_pipes([*module, *command], own_imports())


def start_program(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a program of the system, such as docker, with the environment of this process and pipes to it."""
    return _with_pipes(command, None)


async def start_watched_child(
    module: str,
    *,
    environment: Mapping[str, str] | None = None,
    log: int | None = None,
    report: bool = False,
    inherited: Sequence[int] = (),
    folder: str | None = None,
) -> asyncio.subprocess.Process:
    """As `start_child`, with the child's end and its pipes in the event loop. `folder`: its working folder."""
    command, options = _options(module, (), environment, log, report, inherited, ends_itself=False)
    return await asyncio.create_subprocess_exec(*command, cwd=folder, **options)


def own_imports() -> dict[str, str]:
    """The environment in which a child imports what this process can import, and nothing of the working folder."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}


class ConnectedChild:
    """A child process with a socket to it, for one conversation at a time."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        log: int | None = None,
    ) -> None:
        """As of `start_child`. The module's first argument is the descriptor of its socket (`parents_socket`)."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._child = start_child(
                module, str(descriptor), *arguments, environment=environment, log=log, inherited=(descriptor,)
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._child.poll() is None

    def exit_code(self) -> int | None:
        """The exit code of a child whose connection has closed; None if it goes on nevertheless."""
        with suppress(subprocess.TimeoutExpired):
            return self._child.wait(EXIT_S)
        return None

    def kill(self) -> None:
        """Begin to end it; whoever waits for it sees its connection close."""
        self._child.kill()

    def close(self) -> None:
        """End it, and wait until it is gone."""
        self._child.kill()
        self.connection.close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def parents_socket() -> socket.socket:
    """In the child: the socket of its `ConnectedChild`."""
    return socket.socket(fileno=int(sys.argv[1]))


def _with_pipes(command: Sequence[str], environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=environment)


def _options(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
    log: int | None,
    report: bool,
    inherited: Sequence[int],
    ends_itself: bool,
) -> tuple[list[str], dict[str, Any]]:
    entry = () if ends_itself else ("tinsmith.processes.entry",)
    command = [sys.executable, "-m", *entry, module, *arguments]
    return command, {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE if report else log,
        "stderr": log,
        "pass_fds": tuple(inherited),
        "start_new_session": True,
        "env": {**os.environ, **(environment or {})},
    }
