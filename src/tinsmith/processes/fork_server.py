"""A process that starts programs as forks of itself: `python -m tinsmith.processes.fork_server DESCRIPTOR PRELOAD`.

It calls the function PRELOAD, which imports what the programs need, and then forks for each request of its parent
(`tinsmith.processes.forks`): a program begins without importing anything, and shares the memory of what is imported.
"""

from __future__ import annotations

import ast
import atexit
import fcntl
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tinsmith.imports import import_object
from tinsmith.processes import garbage_collection
from tinsmith.processes.messages import receive_exactly
from tinsmith.processes.parent import end_with_forking_thread
from tinsmith.processes.start import parents_socket

LENGTH_BYTES = 8
"""Bytes before a request, which are its length."""
STATUS_BYTES = 4
"""Bytes of an exit status."""
READY = b"r"
"""What the parent is sent after PRELOAD."""
Request = tuple[list[str], str, dict[str, str], list[int], list[int]]
"""Words of a program, its folder, environment and numbers of descriptors, and the descriptors as they were received."""
_MAX_DESCRIPTORS = 64
_PARKED = 1000
"""Received descriptors are moved to numbers from here on before they get the numbers that the program expects."""


def main() -> None:
    """Entry point of the process."""
    status = ends_at_once()
    connection = parents_socket()
    import_object(sys.argv[2])()
    garbage_collection.leave_out_existing()
    connection.send(READY)
    function, *arguments = become(serve(connection, lambda: _next_program(connection)))
    sys.argv = [function, *arguments]
    run(import_object(function), status)


def ends_at_once() -> list[int]:
    """Have this process and its forks end without taking down their modules, which takes 0.4 s.

    To be called before others register what is to happen at the end. Returns where `run` puts the exit status.
    """
    status = [0]
    atexit.register(_exit, status)
    return status


def run(program: Callable[[], object], status: list[int]) -> None:
    """Run a program; `status` becomes its exit status, or -SIGINT after KeyboardInterrupt, as Python does it."""
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        status[0] = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        status[0] = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _exit(status: list[int]) -> None:
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if status[0] < 0:
        signal.signal(-status[0], signal.SIG_DFL)
        os.kill(os.getpid(), -status[0])
    os._exit(status[0])


def _next_program(connection: socket.socket) -> socket.socket:
    """The socket of the next program."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not data:  # the parent has closed the connection
        sys.exit()
    return socket.socket(fileno=descriptors[0])


def serve(listener: socket.socket, accept: Callable[[], socket.socket]) -> Request:
    """Fork for each program until the parent ends, which closes standard input.

    `accept`: takes the socket of a program from the `listener`. A request comes from there, and then the numbers of
    signals for the program, a byte each; the exit status goes there. A program whose socket is closed is killed.
    Returns in a forked process, with the request that it is to `become`.
    """
    programs: dict[int, socket.socket] = {}
    ended, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        for descriptor in (0, listener, ended):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready:
                sys.exit()
            if ended in ready:
                ended.recv(4096)
            _take_signals(programs, ready, selector)
            # A program that was killed has ended before the next one starts, which may need its files.
            _take_ended(programs, selector)
            if listener in ready:
                client = accept()
                request = _receive(client)
                pid = os.fork()
                if not pid:
                    return request
                for descriptor in request[-1]:
                    os.close(descriptor)
                programs[pid] = client
                selector.register(client, selectors.EVENT_READ)


def _take_signals(
    programs: Mapping[int, socket.socket], ready: Sequence[object], selector: selectors.BaseSelector
) -> None:
    """Send the programs the signals that have come for them."""
    for pid, client in programs.items():
        if client in ready and not _forward_signals(client, pid):
            selector.unregister(client)


def _take_ended(programs: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Remove the programs that have ended, and send their exit statuses."""
    while programs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        client = programs.pop(pid)
        if client in selector.get_map():
            selector.unregister(client)
        with suppress(OSError):  # it was closed
            client.sendall(os.waitstatus_to_exitcode(status).to_bytes(STATUS_BYTES, "little", signed=True))
        client.close()


def _receive(client: socket.socket) -> Request:
    size, descriptors, _, _ = socket.recv_fds(client, LENGTH_BYTES, _MAX_DESCRIPTORS)
    text = receive_exactly(client, int.from_bytes(size, "little"))
    return *ast.literal_eval(text.decode()), descriptors


def _forward_signals(client: socket.socket, pid: int) -> bool:
    """Send the signals of a program's socket to it. If the socket is closed, kill the program, wait for its end, and
    return False."""
    try:
        numbers = client.recv(16)
    except ConnectionError:
        numbers = b""
    for number in numbers or [signal.SIGKILL]:
        os.kill(pid, number)
    if not numbers:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return bool(numbers)


def become(request: Request) -> list[str]:
    """In a forked process, once `serve` has returned: take what its program was given, and nothing of this process.
    Returns the words of the program."""
    words, folder, environment, targets, received = request
    end_with_forking_thread()
    os.setsid()
    signal.set_wakeup_fd(-1)
    parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _PARKED) for descriptor in received]
    os.closerange(0, _PARKED)
    for descriptor, target in zip(parked, targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return words


if __name__ == "__main__":
    main()
