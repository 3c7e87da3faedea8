"""The reverse proxy: nginx with deploy/nginx.conf, and the real SDK through it."""

from __future__ import annotations

import getpass
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from tests.service.conftest import datum
from tests.service.support.process import child, free_port
from tinsmith.service.config import ServeConfig

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NAME = "tinsmith.example.org"

pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (apt-get install nginx-light)"),
]


def make_certificate(folder: Path) -> None:
    """fullchain.pem and privkey.pem of localhost, signed by authority.pem. The SDK refuses self-signed ones."""
    key, days = "-newkey rsa:2048 -nodes", "-days 2"
    (folder / "extensions").write_text("subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n")
    for command in (
        f"req -x509 {key} {days} -subj /CN=authority -keyout authority.key -out authority.pem",
        f"req {key} -subj /CN=localhost -keyout privkey.pem -out request.pem",
        f"x509 -req -in request.pem -CA authority.pem -CAkey authority.key -CAcreateserial {days}"
        " -extfile extensions -out fullchain.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@contextmanager
def proxy(folder: Path, upstream: int) -> Iterator[int]:
    """nginx in front of a port of this machine, with a certificate of its own in `folder`. Yields its TLS port."""
    port, plain = free_port(), free_port()
    make_certificate(folder)
    text = CONFIGURATION.read_text()
    for old, new in (
        ("user www-data;", f"user {getpass.getuser()} {getpass.getuser()};\ndaemon off;"),
        ("worker_processes auto;", "worker_processes 1;"),
        ("/run/nginx.pid", f"{folder}/nginx.pid"),
        ("/var/log/nginx/", f"{folder}/"),
        (f"/etc/letsencrypt/live/{NAME}/", f"{folder}/"),
        ("127.0.0.1:8000", f"127.0.0.1:{upstream}"),
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        (NAME, "localhost"),
    ):
        assert old in text
        text = text.replace(old, new)
    file = folder / "nginx.conf"
    file.write_text(text)
    subprocess.run(["nginx", "-t", "-c", str(file)], check=True, capture_output=True)
    with subprocess.Popen(["nginx", "-c", str(file)], stderr=subprocess.DEVNULL) as nginx:
        try:
            while not (folder / "nginx.pid").exists():
                time.sleep(0.01)
            yield port
        finally:
            nginx.terminate()


def test_sdk_trains_polls_and_downloads_through_nginx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = free_port()
    with proxy(tmp_path, upstream) as port:
        url = f"https://localhost:{port}"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        config = ServeConfig(
            models=("toy",), engine="fake", data=tmp_path / "data", port=upstream, api_key="tml-x", public_url=url
        )
        with child(config, delay=2.0):  # each poll waits for seconds
            client = tinker.ServiceClient(base_url=url, api_key="tml-x")
            model = client.create_lora_training_client("toy", rank=4).result()
            passed = model.forward_backward([datum(list(range(5, 400)), weights=[1.0] * 394)], "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
            assert passed.result().metrics["loss:sum"] > 0
            stepped.result()
            path = model.save_weights_external("out").result().path
            rest = tinker.RestClient(base_url=url, api_key="tml-x")
            link = rest.get_external_weights_urls(path).result().urls["adapter_config.json"]
            assert link.startswith(url)
            assert httpx.get(link).json()["r"] == 4
            stream = {"model": "toy", "prompt": "ab", "max_tokens": 4, "stream": True}
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=stream, headers={"Authorization": "Bearer tml-x"}, timeout=100
            ) as response:
                assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
            assert httpx.get(f"{url}/metrics").status_code == 401  # a request through the proxy is not of this machine
            large = httpx.post(f"{url}/api/v1/forward_backward", content=b"0" * (65 << 20), headers={"X-API-Key": "-"})
            assert large.status_code in (401, 413)
    assert "signature" not in (tmp_path / "tinsmith.log").read_text()
