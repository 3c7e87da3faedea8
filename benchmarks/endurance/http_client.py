"""A small asynchronous client of the service, shaped like the SDK: submit, then poll for the result.

Hundreds of them fit beside the server on two cores, where as many SDK clients would measure themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinsmith.service.wire.protobuf import pb


class RefusedError(Exception):
    """An answer other than 200, or the error of a request."""


class Connection:
    """One HTTP/1.1 connection, opened when it is first used."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request. Returns (status, body)."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"{method} /api/v1/{path} HTTP/1.1\r\nhost: l\r\nx-api-key: {self._key}\r\ncontent-length: {len(body)}"
        writer.write(f"{head}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        status, length = int(answer[9:12]), 0
        for line in answer.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        content = await reader.readexactly(length)
        if b"connection: close" in answer.lower():
            self.close()
        return status, content

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass
class Client:
    """One client: a session and a model in training."""

    port: int
    key: str
    on_submit: Callable[[float], None]
    """Called with the seconds of each submission."""
    requests: int = 0
    """Training and sampling requests that were answered."""
    session: str = ""
    model: str = ""
    _seq: int = 0
    _samples: itertools.count = field(default_factory=itertools.count)
    _free: list[Connection] = field(default_factory=list)

    async def open(self, *, rank: int = 4, model: str = "toy") -> None:
        """Create the session and the model."""
        self.session = (await self.post("create_session", {"tags": []}))["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": rank}}
        self._seq = 0
        self.model = (await self.result(await self.post("create_model", body)))["model_id"]

    async def finish(self) -> None:
        """End the session."""
        await self._call("POST", f"sessions/{self.session}/finish", b"{}", statuses=(204,))

    def close(self) -> None:
        """Close the connections."""
        for connection in self._free:
            connection.close()

    async def step(self, tokens: int) -> None:
        """One forward_backward of a row of tokens and one optim_step, pipelined as the SDK does."""
        passed = await self.submit("forward_backward", pass_body(self.model, self.next_seq(), tokens))
        body = {"model_id": self.model, "seq_id": self.next_seq(), "adam_params": {"learning_rate": 0.001}}
        stepped = await self.submit("optim_step", body)
        await asyncio.gather(self.result(passed), self.result(stepped))

    async def save(self, name: str) -> str:
        """Save a named checkpoint; returns its path."""
        body = {"model_id": self.model, "seq_id": self.next_seq(), "path": name}
        return (await self.result(await self.submit("save_weights", body)))["path"]

    async def delete(self, path: str) -> None:
        """Delete a checkpoint."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        await self._call("DELETE", f"training_runs/{run}/checkpoints/{kind}/{name}", statuses=(200, 204))

    async def snapshot(self) -> str:
        """Make a sampling session of the current weights; returns its id."""
        number = next(self._samples)
        body = {"model_id": self.model, "seq_id": self.next_seq(), "sampling_session_seq_id": number}
        return (await self.result(await self.submit("save_weights_for_sampler", body)))["sampling_session_id"]

    async def sample(self, sampler: str, max_tokens: int) -> None:
        """Sample once from a sampling session."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": next(self._samples),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(5, 21))}]},
            "sampling_params": {"max_tokens": max_tokens, "seed": 1},
        }
        await self.result(await self.submit("asample", body))

    async def submit(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """Send a request and time its promise."""
        start = time.perf_counter()
        promise = await self.post(path, body)
        self.on_submit(time.perf_counter() - start)
        return promise

    async def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        """Poll until there is a result; the JSON of a training result, {} for others. Raises RefusedError."""
        body = json.dumps({"request_id": promise["request_id"]}).encode()
        content = await self._call("POST", "retrieve_future", body, again=408)
        self.requests += 1
        if content[:1] != b"{":
            return {}
        values = json.loads(content)
        if "error" in values:
            raise RefusedError(values["error"])
        return values

    async def post(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """The JSON answer to a POST. Raises RefusedError."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return json.loads(await self._call("POST", path, content))

    async def _call(
        self, method: str, path: str, body: bytes = b"", *, statuses: tuple[int, ...] = (200,), again: int = 0
    ) -> bytes:
        connection = self._free.pop() if self._free else Connection(self.port, self.key)
        while True:
            status, content = await connection.call(method, path, body)
            if status != again:
                break
        self._free.append(connection)
        if status not in statuses:
            raise RefusedError(f"{path}: {status} {content[:200].decode(errors='replace')}")
        return content

    def next_seq(self) -> int:
        """Number of the model's next request."""
        self._seq += 1
        return self._seq


def pass_body(model: str, seq: int, tokens: int) -> bytes:
    """A forward_backward of one row, as the SDK encodes it."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    row = np.arange(3, 3 + tokens) % 500 + 3
    datum.model_input.add().encoded_text.tokens = row.astype("<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = row.astype("<i8").tobytes(), pb.DTYPE_INT64
    target.shape.append(tokens)
    return message.SerializeToString()
