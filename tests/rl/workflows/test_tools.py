"""The workflow `tools`: calls are made, their results are read, and errors are results."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.rl.workflows.test_workflows import TASK, YES, policy, prompt
from tinsmith.errors import ConfigError
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.tools.mcp_server import McpTools
from tinsmith.rl.types import Rollout
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.rl.workflows.tool_use import ToolsConfig

SERVER = '''
import os, sys, time
from pathlib import Path
from mcp.server import MCPServer

server = MCPServer("test")
starts = Path(sys.argv[1])
starts.write_text(starts.read_text() + "+" if starts.exists() else "+")

@server.tool()
def add(a: int, b: int) -> str:
    """Adds."""
    return f"sum {a + b}, started {starts.read_text()}"

@server.tool()
def fail() -> str:
    raise ValueError("not today")

@server.tool()
def end() -> str:
    os._exit(1)

@server.tool()
def hang() -> str:
    time.sleep(60)

@server.tool()
def variables() -> str:
    return " ".join(name for name in ("FIRST_KEY", "SECOND_KEY") if name in os.environ)

server.run(*sys.argv[2:])
'''


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(tools: list[dict], *replies: str, count: int = 1, max_turns: int = 2) -> tuple[Rollout, ...]:
    async def main():
        endpoint = AgentEndpoint()
        context = WorkflowContext(sampling=SamplingConfig(max_tokens=2000), rewards=YES, agent_endpoint=endpoint)
        config = ToolsConfig.model_validate({"tools": tools, "max_turns": max_turns, "system": ""})
        try:
            return await config.make(context).run(TASK, policy(*replies), count=count, seed=5)
        finally:
            await endpoint.close()

    return asyncio.run(main())


def result(rollout: Rollout) -> str:
    """What the policy read after its first reply."""
    assert not rollout.error, rollout.error
    return prompt(rollout.turns[1]).rpartition("|")[2]


@pytest.fixture
def server(tmp_path: Path) -> dict:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "starts")]
    return {"type": "mcp", "command": command}


def test_python_shows_output_and_the_last_value():
    (rollout,) = play([{"type": "python"}], call("python", code="print('a')\n6 * 7"))
    assert result(rollout) == "a\n42"
    assert rollout.termination == "max_turns"
    assert rollout.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}


def test_rollout_ends_with_a_reply_without_a_call():
    rollouts = play([{"type": "python"}], call("python", code="1"), "yes", count=8, max_turns=20)
    assert {(rollout.text, rollout.termination, rollout.reward) for rollout in rollouts} == {("yes", "done", 1.0)}
    assert all(rollout.metrics["tool_calls"] == len(rollout.turns) - 1 for rollout in rollouts)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (call("python", code="1 / 0"), "ZeroDivisionError: division by zero"),
        (call("python", code="while True: pass"), "Error: the program took longer than 0.1 seconds."),
        (call("python", code=5), "Error: the only argument is code, a text."),
        (call("pyton", code="1"), "Error: there is no tool 'pyton'. Tools: python."),
        (call("python", code="print('a' * 200)"), "a" * 99 + "\n[101 more characters are cut off]"),
    ],
    ids=["exception", "time", "argument", "name", "length"],
)
def test_errors_of_a_call_are_results(reply, text):
    timeout = 0.1 if "while" in reply else 60.0  # an exception, of a program on a busy machine, is not late
    tool = {"type": "python", "max_characters": 99 if "200" in reply else 2000, "sandbox": {"timeout": timeout}}
    (rollout,) = play([tool], reply)
    assert result(rollout).endswith(text)
    assert rollout.metrics["tool_errors"] == 2.0 - 2 * ("200" in reply)


@pytest.mark.e2e
def test_tools_of_a_server_are_called(server, monkeypatch):
    monkeypatch.setenv("FIRST_KEY", "a")
    monkeypatch.setenv("SECOND_KEY", "b")
    calls = [call("my_variables"), call("my_add", a=2, b=3), call("my_fail"), call("my_add", a="x"), call("my_end")]
    offered = {"prefix": "my_", "env": ["FIRST_KEY"], "only": ["variables", "fail", "add"]}
    (rollout,) = play([{**server, **offered}], "".join(calls))
    text = result(rollout)
    assert text.startswith("FIRST_KEYsum 5, started +")
    assert all(error in text for error in ("not today", "there is no tool 'my_end'"))
    assert rollout.metrics == {"tool_calls": 10.0, "tool_errors": 6.0}


@pytest.mark.slow
def test_call_beyond_its_time_limit_is_an_error(server):
    (rollout,) = play([{**server, "timeout": 0.2}], call("hang"))
    assert result(rollout) == "Error: no result after 0.2 seconds."


@pytest.mark.e2e
def test_server_that_ends_is_started_again(server):
    (rollout,) = play([server], call("end"))
    assert result(rollout) == "Error: the server of this tool ended during the call."
    assert Path(server["command"][2]).read_text() == "++"


@pytest.mark.slow
def test_server_of_each_rollout_is_its_own(server):
    rollouts = play([{**server, "per_rollout": True}], call("add", a=1, b=1), count=2)
    assert all(result(rollout).startswith("sum 2") for rollout in rollouts)
    assert Path(server["command"][2]).read_text() in ("+", "++")  # the two may write at the same time


def test_server_on_the_network_is_reached_by_its_url(tmp_path):
    pytest.importorskip("mcp")
    import socket

    import uvicorn
    from mcp.server import MCPServer

    mcp_server = MCPServer("test")

    @mcp_server.tool()
    def double(a: int) -> str:
        return str(2 * a)

    async def main():
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        web = uvicorn.Server(uvicorn.Config(mcp_server.streamable_http_app(), log_level="error"))
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        try:
            config = McpTools(url=f"http://127.0.0.1:{port}/mcp")
            async with config.open(None) as tools:
                return [each["function"]["name"] for each in tools.definitions], await tools.call("double", {"a": 4})
        finally:
            web.should_exit = True
            await serving

    names, doubled = asyncio.run(main())
    assert (names, doubled.text, doubled.is_error) == (["double"], "8", False)


def test_server_that_does_not_start_is_named_with_what_it_wrote(server, tmp_path):
    (tmp_path / "server.py").write_text("raise SystemExit('no key is set')")
    (rollout,) = play([server], call("add"))
    assert "server.py" in rollout.error
    assert "no key is set" in rollout.error


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"type": "mcp"}, "set either command, of a server to start, or url"),
        ({"type": "mcp", "command": ["a"], "url": "http://b"}, "set either command, of a server to start, or url"),
        ({"type": "mcp", "url": "http://b", "env": ["KEY"]}, "env"),
    ],
)
def test_wrong_settings_are_refused(settings, error):
    pytest.importorskip("mcp")
    with pytest.raises(ValueError, match=error):
        ToolsConfig.model_validate({"tools": [settings]})


@pytest.mark.slow
def test_unknown_tool_of_a_server_is_refused(server):
    async def main():
        async with McpTools.model_validate({**server, "only": ["ad"]}).open(None):
            pass

    with pytest.raises(ConfigError, match="has no tool 'ad'"):
        asyncio.run(main())
