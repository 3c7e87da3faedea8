"""Files that are there whole or not at all, whenever a process is killed."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(target: Path, content: bytes) -> None:
    """On disk when this returns, or as it was before. Of several who write at once the last one's stays."""
    draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")  # each writer's own; no reader looks for it
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
