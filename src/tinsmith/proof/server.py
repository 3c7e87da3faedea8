"""A server of its own for a proof: started, killed and started again on one port and one data folder."""

from __future__ import annotations

import secrets
import socket
import subprocess
from types import TracebackType

from tinsmith.proof.work import Address
from tinsmith.service.config import KEY_PREFIX, ServeConfig
from tinsmith.service.embedded import end_child, start_child, url_of
from tinsmith.settings import writable_folder


class ProofServer:
    """A server in a child process for the duration of the block. It ends with its parent, in whatever way."""

    def __init__(self, config: ServeConfig) -> None:
        """`config.port` and `config.api_key` are replaced."""
        key = KEY_PREFIX + secrets.token_urlsafe(24)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._config = config.model_copy(update={"host": "127.0.0.1", "port": port, "api_key": key})
        self.address = Address(f"http://127.0.0.1:{port}", key, config.models[0].partition("=")[0])
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ProofServer:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._process is not None:
            end_child(self._process)

    def start(self) -> None:
        """Start the server and wait until its engine is loaded. Raises EngineError if it ends."""
        log = writable_folder(self._config.data, "data") / "serve.log"
        self._process = start_child(self._config, log)
        url_of(self._process, log)

    def kill(self) -> None:
        """End the server with SIGKILL; its engine ends with it."""
        assert self._process is not None
        self._process.kill()
        end_child(self._process)
