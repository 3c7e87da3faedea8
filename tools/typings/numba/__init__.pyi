"""What the engine uses of Numba: compiled functions take and return what their callers make of it."""

from typing import Any

config: Any
types: Any

def njit(**settings: Any) -> Any: ...
