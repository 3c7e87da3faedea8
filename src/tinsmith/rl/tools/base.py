"""What every kind of tool has: definitions for the chat template, and calls whose errors are results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a call, as the policy reads it.

    Example: ToolResult(text="4")
    """

    text: str
    is_error: bool = False
    """Whether the call failed."""


class OpenTools(Protocol):
    """Tools that can be called."""

    @property
    def definitions(self) -> Sequence[Mapping[str, Any]]:
        """Definitions of the tools, in the form of OpenAI's API."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call one of the tools."""
        ...


class ToolOptions(Settings):
    """Base class of an entry of `tools`."""

    max_characters: int = Field(default=8000, ge=1)
    """Length of a result that the policy reads; what is longer is cut off."""

    def open(self, pool: ScoringPool | None) -> AbstractAsyncContextManager[OpenTools]:
        """The tools, open for the duration of the block. Raises ConfigError if they cannot be opened."""
        raise NotImplementedError


def definition(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The definition of a tool; `parameters` is the JSON schema of its arguments."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def shortened(text: str, length: int) -> str:
    """The text, cut off with a note if it has more than `length` characters."""
    return text if len(text) <= length else f"{text[:length]}\n[{len(text) - length} more characters are cut off]"
