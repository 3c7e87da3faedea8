"""A service in a child process, for the duration of a block: the one a run starts if it has no other.

The child learns its configuration from its standard input and dies when that closes, so it cannot outlive its parent,
however that ends. It says on its standard output when it is ready; its log goes to serve.log in its data folder.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tinsmith.errors import EngineError, TinsmithError
from tinsmith.service.config import KEY_PREFIX, ServeConfig
from tinsmith.settings import writable_folder

END_S = 15.0
LOG_LINES = 15


@contextmanager
def embedded(config: ServeConfig) -> Iterator[tuple[str, str]]:
    """(base_url, api_key) of a service on a free port of this machine.

    `host` and `port` are not read; a key is drawn if there is none.

    Raises EngineError with the end of the child's log if it does not start.
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
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the child when it is done with it
        )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it died at once; `_url` reports why
        child.stdin.write(config.model_dump_json().encode() + b"\n")
        child.stdin.flush()
    return child


def _url(child: subprocess.Popen[bytes], log: Path) -> str:
    """The child's URL, once it is ready. Raises EngineError if it exits before."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        code = child.wait()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise EngineError(f"The embedded service ended with code {code} before it was ready:\n{tail}", f"See {log}.")
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
    """The child's side."""
    from tinsmith.service.server import serve  # the parent's side needs no web server

    config = ServeConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_parent, daemon=True).start()

    ready = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed, here or by an engine, belongs in the log

    def announce(url: str, _key: str) -> None:
        os.write(ready, json.dumps({"url": url}).encode() + b"\n")

    try:
        serve(config, on_ready=announce)
    except TinsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _die_with_parent() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would outlive this thread
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
