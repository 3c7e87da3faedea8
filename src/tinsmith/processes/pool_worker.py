"""A process of a pool: `python -m tinsmith.processes.pool_worker DESCRIPTOR MEMORY`. It makes one call at a time.

It sends None when it has imported what a call needs, and then whether the call raised an error, with the value or the
error. It ends when its parent closes the socket.
"""

from __future__ import annotations

import pickle
import resource
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from tinsmith.errors import TinsmithError
from tinsmith.imports import import_object
from tinsmith.processes.messages import encode, receive, send
from tinsmith.processes.pool import CallError
from tinsmith.processes.start import parents_socket
from tinsmith.processes.time_limit import call_with_limit

_MAX_TEXT = 1000
"""Characters of an error's line that are sent."""


def main() -> None:
    """Run calls until the parent closes the socket."""
    connection, memory = parents_socket(), int(sys.argv[2])
    with suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with suppress(EOFError, ConnectionError):  # the parent has closed the socket, or has ended
        while True:
            outcome = _outcome(connection, receive(connection))
            try:
                parts = encode(outcome)
            except Exception as error:  # noqa: BLE001 - a value that cannot be pickled
                parts = encode((True, MemoryError() if isinstance(error, MemoryError) else _described(error)))
            for part in parts:
                connection.sendall(part)


def _outcome(connection: socket.socket, call: bytearray) -> tuple[bool, Any]:
    """Make a call: whether it raised an error, and the value or the error."""
    try:
        function, args, options, seconds = pickle.loads(call)
        if isinstance(function, str):
            function = import_object(function)
    except Exception as error:  # noqa: BLE001 - sent to the caller
        send(connection, None)
        return True, MemoryError() if isinstance(error, MemoryError) else _described(error)
    send(connection, None)
    try:
        return False, call_with_limit(function, args, seconds, options)
    except (TinsmithError, TimeoutError) as error:
        return True, error
    except MemoryError:
        return True, MemoryError()
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - sent to the caller
        return True, _described(error)


def _described(error: BaseException) -> CallError:
    """An error as one that can be pickled: its own class may not be."""
    return CallError(f"{type(error).__name__}: {error}"[:_MAX_TEXT], "".join(traceback.format_exception(error)))


if __name__ == "__main__":
    main()
