"""Python's garbage collector beside many objects that stay: those of imported modules, of which PyTorch and
transformers make a million, and of models."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def leave_out_existing() -> None:
    """Later collections don't visit the objects that exist now, nor write to the memory that forks share.

    For processes of Tinsmith's own: what becomes garbage in cycles among these objects is never collected.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing within the block, for imports and for what loads a model: nearly all that they make stays, and
    collections are a quarter of the time of an import of transformers."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
