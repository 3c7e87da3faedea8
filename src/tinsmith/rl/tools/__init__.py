"""Tools that a policy may call in the workflow `tools`: programs in a sandbox, and tools of MCP servers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.tools.mcp_server import McpTools
from tinsmith.rl.tools.python import PythonTool

ToolConfig = Annotated[PythonTool | McpTools, Field(discriminator="type")]
"""An entry of `tools`."""
