"""Compiles functions before the model that calls them is there: seconds, which other processes take.

In this process they would take the time of what reads the model, because Numba compiles under Python's lock. A process
compiles one part of the functions into Numba's cache folder, with a file that says so. Imports no PyTorch, which takes
as long to import as a part to compile.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tinsmith.processes import garbage_collection

log = logging.getLogger(__name__)

DECODING = "decoding"
"""The name of the part for decoding begins with this; the query heads of a key head and their width follow."""
COMPILE_S = 300
"""What takes longer is left to the first call."""


def compile_ahead(kind: str, *, panels: bool) -> threading.Thread:
    """Compile the functions for an `instructions.Kind`, of `panels` too; the thread that is returned ends when they are
    compiled. What does not compile is left to its first call, which says so."""
    return compile_parts(["attention", *["projections"] * panels], kind)


def compile_decoding(kind: str, group: int, width: int) -> threading.Thread:
    """Compile what is called while a model is loaded, of `group` query heads of this width for each key head; as
    `compile_ahead` does."""
    return compile_parts([f"{DECODING}-{group}-{width}"], kind)


def compile_parts(parts: Sequence[str], kind: str) -> threading.Thread:
    """Compile parts by their names, as `compile_ahead` does."""

    def wait_for_all() -> None:
        missing = [part for part in parts if not is_compiled(part, kind)]
        threads = [threading.Thread(target=_compile_elsewhere, args=(part, kind), name="compile") for part in missing]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    whole = threading.Thread(target=wait_for_all, name="compile")
    whole.start()
    return whole


def is_compiled(part: str, kind: str) -> bool:
    """Whether the functions of a part are in the cache folder."""
    return _marker(part, kind).exists()


def compile_part(part: str, kind: str) -> None:
    """Compile the functions of a part, or read them from the cache folder."""
    from tinsmith.engine.cpu import decoding, logits, loops, packed, projections

    of_head = "pairs" if kind == "pairs" else "float32"
    if part == "attention":
        packed.forward_function(kind)
        packed.backward_function(kind)
        logits.logits_function(of_head)
        logits.narrow_function(of_head)
        if kind == "bfloat16":  # has no part of projections
            projections.compile_layouts(of_head)
    elif part == "layers":
        decoding.layers_function(kind)
    elif part.startswith(DECODING):
        group, width = map(int, part.split("-")[1:])
        decoding.attention_function(kind, group, width, width, width)
        loops.compile_loops(kind)
    else:
        projections.forward_function(kind)
        projections.backward_function(kind)
        projections.gradient_function(kind)
        projections.compile_layouts(of_head)
        logits.backward_function(kind)
    marker = _marker(part, kind)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _compile_elsewhere(part: str, kind: str) -> None:
    command = [sys.executable, "-m", __name__, part, kind]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("Functions are not compiled ahead: %s", error)


def _marker(part: str, kind: str) -> Path:
    from tinsmith.engine.cpu.primitives import config  # with Numba

    return Path(config.CACHE_DIR) / f"{part}-{kind}"


if __name__ == "__main__":
    with garbage_collection.paused():
        compile_part(*sys.argv[1:])
