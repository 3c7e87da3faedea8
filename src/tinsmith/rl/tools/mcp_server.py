"""Tools of a server of the Model Context Protocol, through the package mcp.

A connection is made before the first rollout, and again if it is lost. A call during which it is lost is not repeated,
because it may have had an effect: the policy reads the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.tools.base import OpenTools, ToolOptions, ToolResult, definition, shortened
from tinsmith.settings import Needs

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult


class McpTools(ToolOptions):
    """Tools of an MCP server: a program that is started here (`command`), or one on the network (`url`)."""

    type: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks through its standard input and output. It gets only the variables
    HOME, PATH and the like, and those of `env`."""
    url: str = ""
    """URL of a server that speaks Streamable HTTP, such as http://127.0.0.1:8000/mcp."""
    env: Annotated[tuple[str, ...], Needs("command")] = ()
    """Names of environment variables that the program inherits, such as its API key."""
    key_env: Annotated[str, Needs("url")] = ""
    """Environment variable with a key that is sent as `Authorization: Bearer KEY`."""
    only: tuple[str, ...] = ()
    """Names of the server's tools to offer; empty: all."""
    prefix: str = ""
    """Text before the names of the tools, which distinguishes those of several servers."""
    per_rollout: bool = False
    """Connect to the server, or start it, for each rollout; otherwise once, and all rollouts share its state."""
    timeout: float = Field(default=60.0, gt=0)
    """Time limit of a call, in seconds; the policy reads an error after it."""
    start_timeout: float = Field(default=120.0, gt=0)
    """Time limit of starting the server and listing its tools, in seconds."""

    @model_validator(mode="after")
    def _check_server(self) -> McpTools:
        if find_spec("mcp") is None:
            raise ValueError("MCP servers need the package mcp: pip install 'tinsmith[mcp]'")
        if bool(self.command) == bool(self.url):
            raise ValueError("set either command, of a server to start, or url")
        return self

    @override
    @asynccontextmanager
    async def open(self, pool: ScoringPool | None) -> AsyncIterator[OpenTools]:
        server = _OpenServer(self)
        await server.connect()
        try:
            yield server
        finally:
            await server.close()


class _OpenServer(OpenTools):
    """A server with its present connection."""

    def __init__(self, config: McpTools) -> None:
        self._config = config
        self._names: dict[str, str] = {}
        """The server's names of the tools by those that the policy reads."""
        self._definitions: list[dict[str, Any]] = []
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    @property
    @override
    def definitions(self) -> Sequence[Mapping[str, Any]]:
        return self._definitions

    async def connect(self) -> _Connection:
        """The connection, a new one if the last is lost. Raises ConfigError if the server does not answer."""
        async with self._connecting:
            if self._connection is None or self._connection.is_lost:
                await self.close()
                self._connection = _Connection(self._config)
                self._read_definitions(await self._connection.open())
            return self._connection

    async def close(self) -> None:
        """Close the connection, and end the server if it was started here."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        from mcp import MCPError

        connection = await self.connect()
        try:
            async with asyncio.timeout(self._config.timeout):
                result = await connection.client.call_tool(self._names[name], dict(arguments))
        except TimeoutError:
            return ToolResult(text=f"Error: no result after {self._config.timeout:g} seconds.", is_error=True)
        except (MCPError, OSError, RuntimeError) as error:
            if await connection.answers():
                return ToolResult(text=f"Error: {error}", is_error=True)
            connection.is_lost = True
            return ToolResult(text="Error: the server of this tool ended during the call.", is_error=True)
        return ToolResult(text=shortened(_text(result), self._config.max_characters), is_error=bool(result.is_error))

    def _read_definitions(self, tools: Sequence[Any]) -> None:
        by_name = {tool.name: tool for tool in tools}
        if missing := [name for name in self._config.only if name not in by_name]:
            raise ConfigError(
                f"tools: the MCP server {_title(self._config)} has no tool {missing[0]!r}.",
                f"It has: {', '.join(by_name)}.",
            )
        chosen = self._config.only or tuple(by_name)
        self._names = {self._config.prefix + name: name for name in chosen}
        self._definitions = [
            definition(self._config.prefix + name, by_name[name].description or "", by_name[name].input_schema)
            for name in chosen
        ]


class _Connection:
    """One connection. The package wants it opened and closed in one task, so it has a task of its own."""

    client: Client

    def __init__(self, config: McpTools) -> None:
        self._config = config
        self.is_lost = False
        self._end = asyncio.Event()
        self._tools: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Sequence[Any]:
        """Connect, and return the tools of the server. Raises ConfigError."""
        self._task = asyncio.create_task(self._hold(), name="mcp-connection")
        return await asyncio.shield(self._tools)

    async def close(self) -> None:
        """Disconnect."""
        self._end.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def answers(self) -> bool:
        """Whether the server still answers, after a call that failed."""
        try:
            async with asyncio.timeout(self._config.timeout):
                await self.client.list_tools()
        except Exception:  # noqa: BLE001 - whatever a lost connection raises
            return False
        return True

    async def _hold(self) -> None:
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._config.start_timeout):
                        self.client = await stack.enter_async_context(await self._client(stack, log))
                        tools = await _all_tools(self.client)
                    self._tools.set_result(tools)
                    await self._end.wait()
            except Exception as error:  # noqa: BLE001 - of the server, its program or the network
                self.is_lost = True
                if not self._tools.done():
                    self._tools.set_exception(_not_connected(self._config, error, log))

    async def _client(self, stack: AsyncExitStack, log: IO[str]) -> AbstractAsyncContextManager[Client]:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import get_default_environment, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._config.url:
            http = None
            if key := os.environ.get(self._config.key_env, ""):
                from httpx2 import AsyncClient, Timeout

                headers = {"Authorization": f"Bearer {key}"}
                http = await stack.enter_async_context(AsyncClient(headers=headers, timeout=Timeout(30, read=300)))
            return Client(streamable_http_client(self._config.url, http_client=http))
        variables = {name: os.environ[name] for name in self._config.env if name in os.environ}
        program, *arguments = self._config.command
        server = StdioServerParameters(command=program, args=arguments, env={**get_default_environment(), **variables})
        return Client(stdio_client(server, errlog=log))  # type: ignore[arg-type]  # a text file, as sys.stderr is


async def _all_tools(client: Client) -> list[Any]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def _text(result: CallToolResult) -> str:
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts) or "(no output)"


def _title(config: McpTools) -> str:
    return config.url or " ".join(config.command)


def _not_connected(config: McpTools, error: BaseException, log: IO[str]) -> ConfigError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    log.seek(0)
    said = log.read().strip()[-500:]
    late = f"it did not answer within {config.start_timeout:g} s" if isinstance(error, TimeoutError) else ""
    reason = late or f"{type(error).__name__}: {error}"
    return ConfigError(
        f"tools: the MCP server {_title(config)} cannot be reached: {reason}"
        + (f"\nIt wrote:\n{said}" if said else ""),
        "Start it by hand to see that it works; of a command, name the variables that it needs in env.",
    )
