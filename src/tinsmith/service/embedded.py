"""A service in a child process for the duration of a block. A run without a `base_url` starts one.

The child reads its configuration from standard input, writes its URL to standard output when it is ready, and ends when
its standard input closes: only its parent holds the other end, and the system closes it when the parent ends, after a
SIGKILL too. PR_SET_PDEATHSIG would miss a parent that ended before the call, and take the end of a thread of the parent
for the end of the parent. The log is serve.log in the data folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tinsmith.engine.process_end import process_end
from tinsmith.engine.processes.supervisor import keep_running
from tinsmith.errors import ConfigError, EngineError, TinsmithError, UserError
from tinsmith.processes.parent import watch_parent
from tinsmith.processes.start import start_child
from tinsmith.service.config import KEY_PREFIX, ServeConfig
from tinsmith.settings import writable_folder

END_S = 15.0
"""Time for the child to exit before it is killed."""
LOG_LINES = 15
"""Last lines of the log that an error quotes."""


@contextmanager
def embedded(config: ServeConfig) -> Iterator[tuple[str, str]]:
    """Start a service on a free port of this machine, and stop it after the block. Yields (base_url, api_key).

    A service that ends during the block is started again, on the same port; clients see a pause.

    `config.host` and `config.port` are ignored. Without `config.api_key`, a key is generated. Raises the error of a
    service that does not start, or EngineError with the last lines of its log.
    """
    key = config.api_key or KEY_PREFIX + secrets.token_urlsafe(32)
    config = config.model_copy(update={"host": "127.0.0.1", "port": 0, "api_key": key})
    service = _Service(config, writable_folder(config.data, "data") / "serve.log")
    try:
        yield service.start(), key
    finally:
        service.end()


class _Service:
    """A child process; another takes its place if it ends by itself."""

    def __init__(self, config: ServeConfig, log_file: Path) -> None:
        self._config, self._log_file = config, log_file
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._child = start_service(config, log_file)

    def start(self) -> str:
        """Wait until the service is ready. Returns its URL."""
        url = url_of(self._child, self._log_file)
        self._config = self._config.model_copy(update={"port": urlsplit(url).port})
        threading.Thread(target=asyncio.run, args=(self._supervise(),), name="embedded-service", daemon=True).start()
        return url

    def end(self) -> None:
        """Stop the service."""
        self._ending.set()
        with self._lock:
            child = self._child
        end_service(child)

    async def _supervise(self) -> None:
        """Start the service again whenever it has ended, until `end` is called."""
        supervision = asyncio.create_task(keep_running("The service of this process", self._wait, self._start_again))
        await asyncio.to_thread(self._ending.wait)
        supervision.cancel()

    async def _wait(self) -> str:
        code = await asyncio.to_thread(self._child.wait)
        if self._ending.is_set():
            await asyncio.Event().wait()  # `_supervise` cancels this
        return process_end(code, memory_ran_out=True).text

    async def _start_again(self) -> None:
        await asyncio.to_thread(self._replace)

    def _replace(self) -> None:
        with self._lock:
            if self._ending.is_set():
                return
            end_service(self._child)
            self._child = start_service(self._config, self._log_file)
        try:
            url_of(self._child, self._log_file)
        except TinsmithError:
            if not self._ending.is_set():
                raise


def start_service(config: ServeConfig, log: Path) -> subprocess.Popen[bytes]:
    """Start a service; `url_of` waits until it is ready."""
    with open(log, "ab", opener=_open_private) as out:
        child = start_child("tinsmith.service.embedded", log=out.fileno(), report=True, ends_itself=True)
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # the child has exited; `url_of` reports why
        child.stdin.write(config.model_dump_json().encode() + b"\n")
        child.stdin.flush()
    return child


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def url_of(child: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the child's URL. Raises the child's error if it exits before it is ready."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line.endswith(b"\n"):
        code = child.wait()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise EngineError(f"The embedded service exited with code {code} before it was ready:\n{tail}", f"See {log}.")
    answer = json.loads(line)
    if "url" not in answer:
        child.wait()
        kind = ConfigError if answer["by_user"] else EngineError
        raise kind(f"The service did not start: {answer['message']}", f"{answer['hint']} Its log is {log}.")
    return str(answer["url"])


def end_service(child: subprocess.Popen[bytes]) -> None:
    """Stop a service; it is killed if it takes too long."""
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
    watch_parent(partial(os.kill, os.getpid(), signal.SIGTERM), descriptor=0)

    ready = os.dup(1)
    os.dup2(2, 1)  # any other output, here or of an engine, goes to the log

    def announce(url: str, _key: str) -> None:
        os.write(ready, json.dumps({"url": url}).encode() + b"\n")

    try:
        serve(config, on_ready=announce)
    except TinsmithError as error:
        sys.stderr.write(f"{error}\n")
        answer = {"message": error.message, "hint": error.hint, "by_user": isinstance(error, UserError)}
        os.write(ready, json.dumps(answer).encode() + b"\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
