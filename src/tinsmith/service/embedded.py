"""A service in a child process for the duration of a block. A run without a `base_url` starts one.

The child reads its configuration from standard input and ends when that closes (tinsmith/parent_process.py). It writes
its URL to standard output when it is ready. Its log is serve.log in the data folder.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tinsmith.errors import EngineError, TinsmithError
from tinsmith.parent_process import on_parent_end
from tinsmith.service.config import KEY_PREFIX, ServeConfig
from tinsmith.settings import writable_folder

END_S = 15.0
"""Time for the child to exit before it is killed."""
LOG_LINES = 15
"""Last lines of the log that an error quotes."""


@contextmanager
def embedded(config: ServeConfig) -> Iterator[tuple[str, str]]:
    """Start a service on a free port of this machine, and stop it after the block. Yields (base_url, api_key).

    `config.host` and `config.port` are ignored. Without `config.api_key`, a key is generated. Raises EngineError with
    the last lines of the log if the service does not start.
    """
    key = config.api_key or KEY_PREFIX + secrets.token_urlsafe(32)
    config = config.model_copy(update={"host": "127.0.0.1", "port": 0, "api_key": key})
    log = writable_folder(config.data, "data") / "serve.log"
    child = _start(config, log)
    try:
        yield _url(child, log), key
    finally:
        _end(child)


def _start(config: ServeConfig, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "tinsmith.service.embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            start_new_session=True,  # Ctrl-C then interrupts only the parent, which stops the child at its end
        )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # the child has exited; `_url` reports why
        child.stdin.write(config.model_dump_json().encode() + b"\n")
        child.stdin.flush()
    return child


def _url(child: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the child's URL. Raises EngineError if the child exits before it is ready."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        code = child.wait()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise EngineError(f"The embedded service exited with code {code} before it was ready:\n{tail}", f"See {log}.")
    return str(json.loads(line)["url"])


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
    with suppress(BrokenPipeError):
        child.stdin.close()


def main() -> int:
    """Entry point of the child process."""
    from tinsmith.service.server import serve  # the parent process needs no web server

    config = ServeConfig.model_validate_json(sys.stdin.buffer.readline())
    on_parent_end(0, partial(os.kill, os.getpid(), signal.SIGTERM))

    ready = os.dup(1)
    os.dup2(2, 1)  # any other output, here or of an engine, goes to the log

    def announce(url: str, _key: str) -> None:
        os.write(ready, json.dumps({"url": url}).encode() + b"\n")

    try:
        serve(config, on_ready=announce)
    except TinsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
