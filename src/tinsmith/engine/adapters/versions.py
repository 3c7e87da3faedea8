"""Versions of weights by name, as whoever samples from them keeps them: an engine, a vLLM, or a pool of samplers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from tinsmith.errors import Gone


@dataclass(eq=False, slots=True)
class Version:
    """A version, from the moment at which its name gets it until the name is given to another or removed."""

    number: int = 0
    """No other version of the table has it, not even an earlier one of the same name."""


V = TypeVar("V", bound=Version)


class VersionTable(Generic[V]):
    """Versions by name. Iterates over them, the least recently used first."""

    def __init__(self) -> None:
        self._versions: dict[str, V] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[V]:
        return iter(self._versions.values())

    def items(self) -> list[tuple[str, V]]:
        """Names and their versions."""
        return list(self._versions.items())

    def put(self, name: str, version: V) -> V:
        """Give a name to a version, which gets its number; an earlier version of the name is dropped."""
        self._versions.pop(name, None)
        version.number = next(self._numbers)
        self._versions[name] = version
        return version

    def find(self, name: str) -> V | None:
        """The version of a name; None if it has none."""
        return self._versions.get(name)

    def use(self, name: str) -> V:
        """The version of a name, which is then the most recently used. Raises Gone if it has none."""
        if name not in self._versions:
            raise Gone(f"The engine has no version '{name}'.", "Save the weights again.")
        self._versions[name] = version = self._versions.pop(name)
        return version

    def remove(self, name: str) -> V | None:
        """Take a name's version from the table; None if it has none."""
        return self._versions.pop(name, None)
