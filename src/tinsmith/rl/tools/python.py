"""The tool `python`: executes programs of the policy in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from typing_extensions import override

from tinsmith.rl.sandbox.config import SandboxConfig
from tinsmith.rl.sandbox.execution import Execution, execute
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.tools.base import OpenTools, ToolOptions, ToolResult, definition, shortened


class PythonTool(ToolOptions):
    """Executes a Python program and returns what it prints, with the value of its last expression. Each call is a new
    process in a sandbox, without the variables of the calls before."""

    type: Literal["python"] = "python"
    name: str = "python"
    """Name of the tool, for the policy."""
    description: str = "Executes a Python program and returns its output. Each call starts without variables."
    """Description of the tool, for the policy."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits of the program."""

    @override
    @asynccontextmanager
    async def open(self, pool: ScoringPool | None) -> AsyncIterator[OpenTools]:
        yield _OpenPython(self, pool)


class _OpenPython(OpenTools):
    def __init__(self, config: PythonTool, pool: ScoringPool | None) -> None:
        self._config, self._pool = config, pool

    @property
    @override
    def definitions(self) -> list[dict[str, Any]]:
        code = {"type": "string", "description": "The program."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        return [definition(self._config.name, self._config.description, parameters)]

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) > 1:
            return ToolResult(text="Error: the only argument is code, a text.", is_error=True)
        parts, settings = [("program.py", code)], self._config.sandbox.model_dump()
        if self._pool is None:
            execution = await asyncio.to_thread(execute, parts, settings, "", True)
        else:
            execution = await self._pool.call(
                "tinsmith.rl.sandbox.execution:execute", parts, settings, "", True, seconds=None
            )
        text = shortened(_described(execution, self._config.sandbox), self._config.max_characters)
        return ToolResult(text=text, is_error=execution.ending != "done")


def _described(execution: Execution, limits: SandboxConfig) -> str:
    notes = {
        "timeout": f"Error: the program took longer than {limits.timeout:g} seconds.",
        "output": f"Error: the program printed more than {limits.output_kb} KiB.",
    }
    texts = (execution.output, execution.errors, notes.get(execution.ending, ""))
    return "\n".join(text.rstrip("\n") for text in texts if text.strip()) or "(no output)"
