"""An S3 server on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

from tests.service.support.databases import free_port


@pytest.fixture(scope="module")
def s3_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(URL, process) of moto's S3 server, with a bucket."""
    for name in ("moto", "obstore"):
        pytest.importorskip(name, reason="needs the extra `cluster` and moto[server]")
    port = free_port()
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
        deadline = time.monotonic() + 100
        while True:
            try:
                urlopen(Request(f"{url}/bucket", method="PUT"), timeout=60).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.1)
        yield url, server
    server.kill()
    server.wait()
