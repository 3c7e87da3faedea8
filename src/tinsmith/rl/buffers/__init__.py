"""The table of buffers."""

from __future__ import annotations

from pathlib import Path

from tinsmith.rl.buffers.base import Buffer
from tinsmith.rl.buffers.memory import MemoryBuffer, MemoryConfig

BufferConfig = MemoryConfig


def build(config: BufferConfig, folder: Path) -> Buffer:
    """The buffer that the configuration names, of the run in `folder`."""
    return MemoryBuffer()
