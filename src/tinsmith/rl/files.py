"""Files that are there whole or not at all, whenever a process is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(target: Path, content: bytes) -> None:
    """On disk when this returns, or as it was before."""
    draft = target.with_suffix(".part")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)
