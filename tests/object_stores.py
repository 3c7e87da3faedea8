"""An S3 server on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest


@pytest.fixture(scope="module")
def s3_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(URL, process) of moto's S3 server, with a bucket."""
    for name in ("moto", "obstore"):
        pytest.importorskip(name, reason="needs the extra `cluster` and moto[server]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for _ in range(300):
            try:
                urlopen(Request(f"{url}/bucket", method="PUT"), timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url, server
    server.kill()
    server.wait()
