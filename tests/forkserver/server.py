"""The server of tests/forkserver: `python -m tests.forkserver.server SOCKET EXECUTABLE`."""

from __future__ import annotations

import ast
import atexit
import fcntl
import gc
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

MAX_DESCRIPTORS = 64
PARKED = 1000
"""Received descriptors are moved to numbers from here on before they get the numbers that the program expects."""


def preload() -> None:
    """Import what programs import; nothing of it may start a thread."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import tinsmith.cli
    import tinsmith.engine.cluster.worker
    import tinsmith.engine.fake.engine
    import tinsmith.engine.torch_engine
    import tinsmith.runner
    import tinsmith.service.server  # noqa: F401
    from tests import lost_cancellations
    from tinsmith.dialects import dialects

    dialects()
    lost_cancellations.mend()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    gc.collect()
    gc.freeze()


def main() -> None:
    """Fork for each connection until the process is terminated. Only a forked process returns: it runs its program."""
    path, executable = sys.argv[1:]
    preload()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    program = serve(listener)
    sys.executable = executable
    end(program)


def end(program: Callable[[], None]) -> NoReturn:
    """Run a program and end this process as Python does, but without taking down the modules, which takes 0.4 s."""
    status, interrupted = 0, False
    try:
        program()
    except SystemExit as error:
        match error.code:
            case None:
                pass
            case int():
                status = error.code
            case message:
                print(message, file=sys.stderr)
                status = 1
    except BaseException as error:  # noqa: BLE001 (as Python does)
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def serve(listener: socket.socket) -> Callable[[], None]:
    """Serve clients until the parent ends, which closes standard input. Returns in a forked process, with the program
    to run."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            # A killed program ends before the next one starts, which may need its files.
            for key, _ in sorted(selector.select(), key=lambda event: event[0].fileobj is listener):
                if key.fd == 0:
                    sys.exit()
                if selector.get_map().get(key.fd) is not key:
                    continue  # a program and its client ended at once, and `finish` has closed the client's socket
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    request, received = receive(client)
                    child = os.fork()
                    if not child:
                        return lambda: run(*request, received)
                    for descriptor in received:
                        os.close(descriptor)
                    selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, client))
                    selector.register(client, selectors.EVENT_READ, (child, None))
                elif key.data[1] is None:
                    forward_signals(key.fileobj, key.data[0], selector)
                else:
                    child, client = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    finish(child, client, selector)


def receive(client: socket.socket) -> tuple[tuple[list[str], str, dict[str, str], list[int]], list[int]]:
    """A client's request (arguments, folder, environment, numbers of descriptors), and the descriptors."""
    size, descriptors, _, _ = socket.recv_fds(client, 8, MAX_DESCRIPTORS)
    with client.makefile("rb") as stream:
        text = stream.read(int.from_bytes(size, "little"))
    return ast.literal_eval(text.decode()), descriptors


def forward_signals(client: socket.socket, child: int, selector: selectors.BaseSelector) -> None:
    """Send the client's signals to its program. If the client has ended, kill the program and wait for its end."""
    try:
        numbers = client.recv(16)
    except ConnectionError:
        numbers = b""
    for number in numbers or [signal.SIGKILL]:
        os.kill(child, number)
    if not numbers:
        selector.unregister(client)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


def finish(child: int, client: socket.socket, selector: selectors.BaseSelector) -> None:
    """Send the exit status of an ended program to its client."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if client in selector.get_map():
        selector.unregister(client)
    with suppress(OSError):  # the client was killed
        client.sendall(status.to_bytes(4, "little", signed=True))
    client.close()


def run(words: list[str], folder: str, environment: dict[str, str], targets: list[int], received: list[int]) -> None:
    """Run a program as `python WORDS` in this process."""
    parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, PARKED) for descriptor in received]
    os.closerange(0, PARKED)
    for descriptor, target in zip(parked, targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    match words[1:] if words[:1] == ["-P"] else words:
        case ["-m", module, *arguments]:
            sys.path[0] = folder
            sys.argv = ["-m", *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", text, *arguments]:
            sys.path[0] = ""
            sys.argv = ["-c", *arguments]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        case [file, *arguments]:
            sys.path[0] = str(Path(file).parent.absolute())
            sys.argv = [file, *arguments]
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
