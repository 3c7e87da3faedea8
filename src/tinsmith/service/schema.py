"""The protocol's protobuf messages, from the SDK's own file but without the SDK.

Importing `tinker` imports torch, which would cost the API process seconds and hundreds of megabytes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _load() -> ModuleType:
    package = importlib.util.find_spec("tinker")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("tinker_public_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb
else:
    pb = _load()

__all__ = ["pb"]
