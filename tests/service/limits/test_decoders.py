"""Processes that decode large bodies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tinsmith.errors import BadRequest, Busy, TooLarge
from tinsmith.service.concurrency import LARGE_BYTES
from tinsmith.service.limits.decoders import Decoders
from tinsmith.service.wire.sample_request import decode_sample

BODY = {"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": list(range(20_000))}]}}


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tinsmith.processes.pool_worker" in child.cmdline()]


def test_worker_returns_values_and_raises_errors() -> None:
    async def main() -> None:
        decoders, body = Decoders(), json.dumps(BODY).encode()
        assert len(body) > LARGE_BYTES
        try:
            results = await asyncio.gather(*(decoders.run(len(body), decode_sample, body) for _ in range(3)))
            assert [list(result.request.prompt) for result in results] == [list(range(20_000))] * 3
            assert 1 <= len(workers()) <= 2
            with pytest.raises(BadRequest, match="The body is invalid"):
                await decoders.run(LARGE_BYTES + 1, decode_sample, b"{}")
        finally:
            decoders.close()
        assert workers() == []

    asyncio.run(main())


def test_body_that_needs_much_memory_is_refused() -> None:
    """Fails without RLIMIT_AS: the worker would take gigabytes."""

    async def main() -> None:
        decoders = Decoders(1)
        try:
            with pytest.raises(TooLarge, match="memory"):
                await decoders.run(LARGE_BYTES + 1, bytes, 2**32)
            assert await decoders.run(LARGE_BYTES + 1, bytes, 3) == bytes(3)
        finally:
            decoders.close()

    asyncio.run(main())


def test_small_bodies_need_no_worker() -> None:
    async def main() -> None:
        decoders = Decoders()
        small = json.dumps({**BODY, "prompt": {"chunks": [{"tokens": [1]}]}}).encode()
        assert (await decoders.run(len(small), decode_sample, small)).seq == 1
        assert workers() == []
        decoders.close()

    asyncio.run(main())


def test_dead_worker_is_replaced() -> None:
    async def main() -> None:
        decoders, body = Decoders(1), json.dumps(BODY).encode()
        try:
            await decoders.run(len(body), decode_sample, body)
            (worker,) = workers()
            worker.kill()
            worker.wait()
            assert (await decoders.run(len(body), decode_sample, body)).seq == 1
            with pytest.raises(Busy, match="Submit it again"):
                await decoders.run(LARGE_BYTES + 1, os._exit, 3)
            assert (await decoders.run(len(body), decode_sample, body)).seq == 1
        finally:
            decoders.close()

    asyncio.run(main())


def test_two_bodies_do_not_take_the_same_idle_process() -> None:
    """Fails if two calls share a process: each would get the other's reply."""

    async def main() -> None:
        decoders = Decoders(2)
        try:
            await decoders.run(LARGE_BYTES + 1, bytes, 1)
            sizes = await asyncio.gather(*(decoders.run(LARGE_BYTES + 1, bytes, size) for size in (2, 3, 4, 5)))
            assert sizes == [bytes(2), bytes(3), bytes(4), bytes(5)]
        finally:
            decoders.close()
        assert workers() == []

    asyncio.run(main())


def test_workers_import_neither_torch_nor_a_web_server() -> None:
    code = "import sys, tinsmith.processes.pool_worker, tinsmith.service.openai.schemas;"
    code += "import tinsmith.service.wire.sample_request, tinsmith.service.wire.passes;"
    code += "print([m for m in ('torch', 'tinker', 'transformers', 'starlette', 'sqlalchemy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


def test_workers_end_with_their_parent() -> None:
    code = """
import asyncio, json, os, psutil
from tinsmith.service.limits.decoders import Decoders
asyncio.run(Decoders().run(10**6, len, b""))
print([child.pid for child in psutil.Process().children()], flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL
    (pid,) = json.loads(done.stdout)
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and time.monotonic() < deadline and psutil.Process(pid).status() != "zombie":
        time.sleep(0.01)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    assert os.getpid() != pid
