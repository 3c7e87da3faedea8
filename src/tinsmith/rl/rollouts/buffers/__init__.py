"""Buffers: where batches wait between sampling and training. Maps buffer settings to their classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.buffers.file import FileBuffer, FileConfig
from tinsmith.rl.rollouts.buffers.memory import MemoryBuffer, MemoryConfig
from tinsmith.rl.rollouts.buffers.sql import SqlBuffer, SqlConfig

BufferConfig = Annotated[MemoryConfig | FileConfig | SqlConfig, Field(discriminator="type")]


def build(config: BufferConfig, folder: Path, name: str) -> Buffer:
    """The buffer of run `name`. `folder`: default place of its files. Raises ConfigError if its database cannot be
    opened."""
    match config:
        case FileConfig():
            return FileBuffer(Path(config.path).expanduser() if config.path else folder)
        case SqlConfig():
            return SqlBuffer(config.url, config.run or name)
        case _:
            return MemoryBuffer()
