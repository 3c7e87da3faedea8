"""Functions whose machine code the engine writes."""

from typing import Any

def intrinsic(function: Any) -> Any: ...
