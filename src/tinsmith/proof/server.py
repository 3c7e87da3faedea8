"""A server of its own for a proof: started, killed and started again on one port and one data folder."""

from __future__ import annotations

import secrets
import subprocess
from types import TracebackType
from urllib.parse import urlsplit

from tinsmith.proof.work import Address
from tinsmith.service.config import KEY_PREFIX, ServeConfig
from tinsmith.service.embedded import end_service, start_service, url_of
from tinsmith.settings import writable_folder


class ProofServer:
    """A server in a child process for the duration of the block. It ends with its parent, in whatever way."""

    def __init__(self, config: ServeConfig) -> None:
        """`config.port` and `config.api_key` are replaced. The first start takes a free port, which later ones keep."""
        self._key = KEY_PREFIX + secrets.token_urlsafe(24)
        self._config = config.model_copy(update={"host": "127.0.0.1", "port": 0, "api_key": self._key})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ProofServer:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._process is not None:
            end_service(self._process)

    @property
    def address(self) -> Address:
        """The address of the server, once it was started."""
        return Address(f"http://127.0.0.1:{self._config.port}", self._key, self._config.models[0].partition("=")[0])

    def start(self) -> None:
        """Start the server and wait until its engine is loaded. Raises EngineError if it ends."""
        log = writable_folder(self._config.data, "data") / "serve.log"
        self._process = start_service(self._config, log)
        url = url_of(self._process, log)
        self._config = self._config.model_copy(update={"port": urlsplit(url).port})

    def kill(self) -> None:
        """End the server with SIGKILL; its engine ends with it."""
        assert self._process is not None
        self._process.kill()
        end_service(self._process)
