"""The unmodified cookbook: installed from the package registry into a venv that also sees the test venv's packages.

Only missing packages are downloaded. `tml-renderers` is left out, since these recipes do not use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import certificates
from tests.service.support.databases import free_port

COOKBOOK = "tinker-cookbook==0.6.1"
ITS_NEEDS = (
    "aiohttp==3.14.5",
    "blobfile==3.3.0",
    "chz==0.4.0",
    "cloudpickle==3.1.2",
    "pylatexenc==2.11",
    "pyrage==1.4.0",
    "termcolor==3.3.0",
    "tiktoken==0.14.0",
)
KEY = "tml-cookbook"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv with the cookbook."""
    return install_cookbook(tmp_path_factory.mktemp("cookbook") / "venv")


def install_cookbook(folder: Path) -> Path:
    """Create a venv with the cookbook; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    inside = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = sysconfig.get_path("purelib")  # with its own .pth files, such as that of an editable installation
    (Path(inside.stdout.strip()) / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for arguments in (["--no-deps", COOKBOOK], [*ITS_NEEDS]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], env=certificates.SYSTEM, check=True)
    return python


SMOLLM2 = "local/smollm2"
"""A model's name that is also a path: of a folder with the tokenizer, where recipe and server run."""


def recipe_folder(smollm2: Path, folder: Path) -> Path:
    """Make `folder` one that recipes and server run in: SMOLLM2 is a path in it."""
    (folder / SMOLLM2).parent.mkdir()
    (folder / SMOLLM2).symlink_to(smollm2)
    return folder


@contextmanager
def serving(workplace: Path, data: Path, models: Sequence[str], *options: str) -> Iterator[str]:
    """Address of `tinsmith serve` in the folder, which must end within a minute of SIGTERM.

    `options`: more of its command line.
    """
    port = free_port()
    command = [sys.executable, "-m", "tinsmith", "serve", "--dtype", "float32", "--api-key", KEY]
    command += ["--port", str(port), "--data", str(data)]
    for model in models:
        command += ["--model", model]
    command += options
    server = subprocess.Popen(command, cwd=workplace)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(server, f"{address}/api/v1/healthz")
        yield address
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


def run_recipe(python: Path, workplace: Path, url: str, name: str, settings: dict[str, object]) -> list[dict[str, Any]]:
    """Run a recipe of the cookbook; returns the lines of its metrics."""
    log = Path(str(settings["log_path"]))
    settings = {"base_url": url, **settings}
    command = [python, "-m", f"tinker_cookbook.recipes.{name}.train", *(f"{k}={v}" for k, v in settings.items())]
    surroundings = {
        **os.environ,
        "TINKER_API_KEY": KEY,
        "TINKER_BASE_URL": url,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(log.parent / "hf"),
        "WANDB_MODE": "disabled",
    }
    done = subprocess.run(command, cwd=workplace, env=surroundings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended before it was ready"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing healthy at {url}")
