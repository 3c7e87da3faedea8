"""An engine in a process of its own, so that Python in a model's forward never delays an answer.

The parent keeps a RemoteEngine: every method is one message over a socket pair and one answer, matched by number; a
sample whose tokens someone wants to hear sends them before its answer, under the same number.
The child (`python -m tinsmith.engine.process FD`) builds the engine and answers until the socket closes, so it never
outlives its parent. A child that dies ends every call with EngineDied and sets `died`; starting another is the
caller's business.

The parent's end of the socket is asyncio's; the child's is a Link, whose threads go on while the engine computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tinsmith.engine.base import (
    AdamParams,
    Engine,
    Heard,
    LoraSpec,
    ModelCard,
    Pass,
    PassResult,
    Piece,
    Sampled,
    SampleRequest,
)
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import ConfigError, EngineDied, EngineError, TinsmithError


def build(config: EngineConfig) -> Engine:
    """A loaded engine of this process. Raises ConfigError or Unsupported when the model is not to be served."""
    if config.sampler == "vllm":
        raise ConfigError("An engine of one process samples by itself.", "With a vLLM: engine.vllm.VllmEngine.start.")
    if config.kind == "fake":
        from tinsmith.engine.fake.engine import FakeEngine

        return FakeEngine(config)
    from tinsmith.engine.torch_engine import TorchEngine

    return TorchEngine(config)


LENGTH = struct.Struct("<Q")


def packed(message: Any) -> tuple[bytes, bytes]:
    """A message as it goes over: its length, and itself."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)), data


class Link:
    """Ends the process when the other end hangs up: nothing here is worth waiting for then."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb", buffering=1 << 20)
        self._out: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
        threading.Thread(target=self._write, name="link-write", daemon=True).start()

    def receive(self) -> Any:
        """The next message; waits for it."""
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return pickle.loads(self._exactly(size))

    def listen(self, hear: Callable[[Any], None]) -> None:
        """From now on `hear` is called with each message, in the running event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, hear), name="link-read", daemon=True).start()

    def send(self, message: Any) -> None:
        """Messages leave in the order of their sending; nothing waits for them. From any thread."""
        self._out.put(packed(message))

    def _read(self, loop: asyncio.AbstractEventLoop, hear: Callable[[Any], None]) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(hear, self.receive())
        except Exception:  # noqa: BLE001 - whatever it is, a process that no longer reads must not seem to live
            traceback.print_exc()
            os._exit(1)

    def _write(self) -> None:
        while True:
            parts = self._out.get()
            try:
                for part in parts:
                    self._connection.sendall(part)
            except OSError:
                os._exit(0)

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError:
            data = b""
        if len(data) < size:
            os._exit(0)
        return data


log = logging.getLogger(__name__)

_BUFFER = 1 << 24
_POLITE_S = 4.0
_PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""Threads of one operation sleep while they wait for each other. By default they spin, and beside another busy process
(a harness, a browser) on as many cores that made decoding 6 to 10 times slower."""


class RemoteEngine:
    """Implements `engine.base.Engine` for an engine in a child process; make one with `start`."""

    def __init__(
        self,
        card: ModelCard,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.card = card
        self.died = asyncio.Event()
        self._child, self._reader, self._writer = child, reader, writer
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._heard: dict[int, Heard] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, config: EngineConfig) -> RemoteEngine:
        """A child with its model loaded. Raises what the child raised while loading."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_PATIENT | os.environ,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_BUFFER)
        try:
            await _send(writer, config)
            card = await _receive(reader)
        except (asyncio.IncompleteReadError, OSError):
            code = await child.wait()
            hint = "The system ended it: most likely the memory was too small." if code == -signal.SIGKILL else ""
            card = EngineDied(f"The engine for {config.source} ended while loading (exit {code}).", hint)
        if isinstance(card, Exception):
            await _close(writer)
            await child.wait()
            raise card
        return cls(card, child, reader, writer)

    @property
    def pid(self) -> int:
        """The child's."""
        return self._child.pid

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        await self._call("create", model_id, lora)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        return await self._call("run", list(passes))

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self._call("step", model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self._call("save", model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self._call("load", model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self._call("drop", model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self._call("capture", model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self._call("persist", version, to)

    async def attach(self, version: str, source: Path) -> None:
        await self._call("attach", version, source)

    async def detach(self, version: str) -> None:
        await self._call("detach", version)

    async def sample(self, request: SampleRequest, heard: Heard | None = None) -> Sampled:
        return await self._call("sample", request, heard=heard)

    async def cancel(self, request_id: str) -> None:
        await self._call("cancel", request_id)

    async def close(self) -> None:
        """End the child and wait for it. One that does not go by itself is killed, also if the caller does not wait."""
        try:
            async with asyncio.timeout(_POLITE_S):
                await _close(self._writer)  # a child that is stuck does not even read what was written
                await self._child.wait()
        except TimeoutError:
            log.warning("The engine's process %d did not end by itself.", self.pid)
        finally:
            if self._child.returncode is None:
                self._child.kill()
        await self._child.wait()
        await self._listener

    async def _call(self, method: str, *args: Any, heard: Heard | None = None, **options: Any) -> Any:
        if self.died.is_set():
            raise EngineDied("The engine's process is gone.", "It is being started again; try later.")
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        if heard is not None:
            self._heard[number] = heard
        try:
            await _send(self._writer, (number, method, args, options, heard is not None))
            return await self._calls[number]
        except ConnectionError as error:
            raise EngineDied("The engine's process is gone.", "It is being started again; try later.") from error
        finally:
            self._calls.pop(number, None)
            self._heard.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                number, ok, value = await _receive(self._reader)
                call = self._calls.get(number)
                if isinstance(value, Piece):
                    if (heard := self._heard.get(number)) is not None:
                        heard(value)
                elif call is not None and not call.done():
                    call.set_result(value) if ok else call.set_exception(value)
        except (asyncio.IncompleteReadError, OSError):
            pass  # it ended
        except Exception:
            log.exception("The engine's process %d said what cannot be read; it is started again.", self.pid)
        finally:
            self.died.set()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(EngineDied("The engine's process ended.", "It is being started again."))


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    for part in packed(message):
        writer.write(part)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


async def _serve(link: Link) -> None:
    """The child's life: load, then answer each message in a task of its own, until the parent hangs up."""
    engine = _loaded(link.receive(), link)
    if engine is None:
        await asyncio.to_thread(link.receive)  # the parent has the reason now, and hangs up
        return
    tasks: set[asyncio.Task[None]] = set()

    def hear(message: Any) -> None:
        task = asyncio.create_task(_answer(engine, link, *message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    link.listen(hear)
    await asyncio.Event().wait()


def _loaded(config: EngineConfig, link: Link) -> Engine | None:
    """The engine, its card sent; or None and the reason sent."""

    try:
        engine = build(config)
    except TinsmithError as error:
        link.send(error)
        return None
    link.send(engine.card)
    return engine


async def _answer(
    engine: Engine, link: Link, number: int, method: str, args: tuple[Any, ...], options: dict[str, Any], tells: bool
) -> None:
    if tells:
        options["heard"] = lambda piece: link.send((number, True, piece))
    try:
        answer = (number, True, await getattr(engine, method)(*args, **options))
    except TinsmithError as error:
        answer = (number, False, error)
    except Exception as error:  # noqa: BLE001 - a boundary between processes: the caller must hear of any fault
        answer = (number, False, EngineError(f"{method} failed in the engine: {type(error).__name__}: {error}"))
    link.send(answer)


def main() -> None:
    """Entry of the child: the socket's file descriptor is the one argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then hangs up
    asyncio.run(_serve(Link(socket.socket(fileno=int(sys.argv[1])))))


if __name__ == "__main__":
    main()
