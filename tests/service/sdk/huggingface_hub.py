"""A stub of the Hugging Face hub for `tinker checkpoint push-hf`: stores committed files in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """A hub with one user."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            self._say({"name": "smith", "type": "user", "auth": {}})
        else:
            self._say({"error": "Entry not found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/api/repos/create":
            request = json.loads(body)
            self.server.repos[request["name"]] = request
            self._say({"url": f"{self.server.url}/smith/{request['name']}"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self._say({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._say({"commitUrl": f"{self.server.url}/smith/x/commit/1", "commitOid": "1" * 40})
        else:
            self._say({})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _say(self, answer: object, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
