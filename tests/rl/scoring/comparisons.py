"""Functions that the tests run in worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress


def echo(value: object) -> object:
    return value


def process_id() -> int:
    return os.getpid()


def print_and_raise(text: str) -> None:
    print(text)
    print(text, file=sys.stderr)
    os.write(1, text.encode())
    os.write(2, text.encode())
    raise ValueError(text)


def wait(seconds: float) -> float:
    """Waits in Python, where a signal interrupts it; exceptions are caught as libraries do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(Exception):
            time.sleep(0.01)
    return seconds


def hang() -> None:
    """Cannot be interrupted, as a long operation of a C library."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)


def exit_process() -> None:
    os._exit(3)


def allocate(size: int) -> int:
    return len(bytes(size))
