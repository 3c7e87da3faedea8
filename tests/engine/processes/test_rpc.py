"""Typed calls: the client has the engine's methods, and a process answers no others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tinsmith.engine.base import AdamParams
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.interface import Engine
from tinsmith.engine.processes.client import start_local
from tinsmith.engine.processes.rpc import EngineClient, methods_of
from tinsmith.errors import EngineError


def test_client_has_the_methods_of_the_protocol() -> None:
    """With their parameters and replies: a new method of `Engine` without its call fails here."""
    client = dict(methods_of(EngineClient))
    assert list(client.pop("call").parameters) == ["self", "method", "args", "options"]
    assert client == {name: each for name, each in methods_of(Engine).items() if name != "close"}


def test_calls_reach_the_method_that_they_name() -> None:
    class Recorder(EngineClient):
        def __init__(self) -> None:
            self.methods: list[str] = []

        async def call(self, method: Any, *args: Any, **options: Any) -> Any:
            inspect.signature(method).bind(None, *args, **options)
            self.methods.append(method.__name__)
            return []

    recorder = Recorder()
    for name, signature in methods_of(Engine).items():
        if name != "close":
            values = {each: [] for each in signature.parameters if each != "self"}
            positional = [values.pop(each) for each in list(values) if each != "optimizer"]
            coroutine = getattr(recorder, name)(*positional, **values)
            with pytest.raises(StopIteration):
                coroutine.send(None)
            assert recorder.methods[-1] == name


def test_process_answers_methods_only(wait: Any) -> None:
    async def run() -> None:
        engine = await start_local(EngineConfig(source="toy", kind="fake"))
        try:
            for name in ("_model", "card", "__init__", "nothing"):

                async def method(self: Any) -> None: ...

                method.__name__ = name
                with pytest.raises(EngineError, match=f"no method {name}"):
                    await engine.call(method)
            with pytest.raises(EngineError, match="no model m"):
                await engine.call(FakeEngine.step, "m", AdamParams())
        finally:
            await engine.close()

    wait(run())
