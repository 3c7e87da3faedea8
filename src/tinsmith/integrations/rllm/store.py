"""State that the rollouts of a run share, under the names of rLLM."""

from __future__ import annotations

from typing import Any, Protocol

from typing_extensions import override


class Store(Protocol):
    """Values by key, shared by all workflows of a run."""

    async def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        ...

    async def set(self, key: str, value: Any) -> None:
        """Set the value of a key."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    async def keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`."""
        ...


class InMemoryStore(Store):
    """Values in memory. A run saves those of its own store that JSON can hold with each checkpoint."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        """`values` is the dict to keep them in."""
        self._values: dict[str, Any] = {} if values is None else values

    @override
    async def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    @override
    async def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    @override
    async def delete(self, key: str) -> None:
        self._values.pop(key, None)

    @override
    async def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]
