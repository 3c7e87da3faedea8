"""The main loop of a worker process: one comparison at a time, each with a time limit.

Each line of standard input is a request (function, arguments, seconds), pickled and in base64. The process writes a
line of JSON when it begins a comparison, after the imports that it needs, and another with the result. It ends with
its standard input.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tinsmith.imports import import_object
from tinsmith.rl.scoring.time_limit import call_with_limit

MEMORY_BYTES = 4 << 30
"""Address space of a worker. A comparison that needs more fails with a MemoryError."""
_MAX_ERROR = 1000
"""Characters of an error's message that are sent."""


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries that print
    with suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        try:
            name, arguments, seconds = pickle.loads(base64.b64decode(line))
            function = import_object(name)
        except Exception as error:  # noqa: BLE001  sent to the caller
            reply = _error(error)
            _write(replies, {})
        else:
            _write(replies, {})
            reply = _run(function, arguments, seconds)
        _write(replies, reply)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    try:
        return {"value": call_with_limit(function, arguments, seconds)}
    except TimeoutError:
        return {"timeout": True}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  sent to the caller
        return _error(error)


def _error(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}


def _write(file: Any, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    main()
