"""A service for the endurance benchmarks, with a key for each tenant."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from benchmarks.servers import KEY, Server
from tinsmith.service.config import ServeConfig
from tinsmith.service.tenancy.keys import create_key, open_key_database


@asynccontextmanager
async def running_service(
    data: Path,
    tenants: Sequence[str],
    *,
    model: str | None = None,
    module: str = "tinsmith.service.embedded",
    **settings: object,
) -> AsyncIterator[tuple[Server, int, list[str]]]:
    """Run a service of the model `toy`, fake or from a folder. Yields (server, port, keys of the tenants)."""
    async with open_key_database(data, None) as engine:
        keys = [(await create_key(engine, name, name))[0] for name in tenants]
    engine_settings = {"engine": "fake"} if model is None else {"engine": "torch", "dtype": "float32"}
    source = "toy" if model is None else f"toy={model}"
    config = ServeConfig(
        models=(source,), data=data, port=0, api_key=KEY, log_level="warning", **engine_settings, **settings
    )
    with (data / "serve.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise RuntimeError((data / "serve.log").read_text())
        url = json.loads(line)["url"]
        yield Server(url=url, process=psutil.Process(process.pid)), int(url.rpartition(":")[2]), keys
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdin.close()
        process.stdout.close()
