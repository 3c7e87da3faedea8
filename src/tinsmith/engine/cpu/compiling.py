"""Compiles functions before the model that calls them is there: seconds, which other processes take.

In this process they would take the time of what reads the model, because Numba compiles under Python's lock. A process
compiles parts of the functions into Numba's cache folder, one after the other, each with a file that says so. Functions
for gradients come last, while the model is checked and answers its first requests. Imports no PyTorch, which takes as
long to import as a part to compile.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tinsmith.processes import garbage_collection
from tinsmith.processes.start import start_child

log = logging.getLogger(__name__)

DECODING = "decoding"
"""The name of the part for decoding begins with this; the query heads of a key head and their width follow."""
GRADIENTS = "-gradients"
"""The name of a part for gradients ends with this."""
COMPILE_S = 300
"""What takes longer is left to the first call."""
LEAST_PRIORITY = 19


class Compilation:
    """Parts that other processes compile. What does not compile is left to its first call, which says so."""

    def __init__(self) -> None:
        self._ends: dict[str, threading.Event] = {}

    def start(self, kind: str, *parts: str) -> None:
        """Compile parts for an `instructions.Kind` in a process of their own, one after the other."""
        missing = [part for part in parts if not is_compiled(part, kind)]
        ends = {part: threading.Event() for part in missing}
        self._ends |= ends
        if missing:
            threading.Thread(target=_compile_elsewhere, args=(kind, ends), name="compile").start()

    def start_ahead(self, kind: str, *, panels: bool) -> None:
        """Compile what every model of an `instructions.Kind` needs, of `panels` too."""
        for part in ["attention", *["projections"] * panels]:
            self.start(kind, part, part + GRADIENTS)

    def start_decoding(self, kind: str, group: int, width: int) -> None:
        """Compile what is called while a model is loaded, of `group` query heads of this width for each key head."""
        self.start(kind, f"{DECODING}-{group}-{width}")

    def wait(self, *, gradients: bool = False) -> None:
        """Wait for all but the functions for gradients, or for these."""
        for end in self._ends_of(gradients):
            end.wait()

    @property
    def compiles_gradients(self) -> bool:
        """Whether functions for gradients are being compiled."""
        return not all(end.is_set() for end in self._ends_of(gradients=True))

    def _ends_of(self, gradients: bool) -> list[threading.Event]:
        return [end for part, end in self._ends.items() if part.endswith(GRADIENTS) == gradients]


def is_compiled(part: str, kind: str) -> bool:
    """Whether the functions of a part are in the cache folder."""
    return _marker(part, kind).exists()


def compile_part(part: str, kind: str) -> None:
    """Compile the functions of a part, or read them from the cache folder."""
    from tinsmith.engine.cpu import decoding, logits, loops, packed, projections

    of_head = "pairs" if kind == "pairs" else "float32"
    if part == "attention":
        packed.forward_function(kind)
        logits.logits_function(of_head)
        logits.narrow_function(of_head)
        if kind == "bfloat16":  # has no part of projections
            projections.compile_layouts(of_head)
    elif part == f"attention{GRADIENTS}":
        packed.backward_function(kind)
    elif part == "layers":
        decoding.layers_function(kind)
    elif part.startswith(DECODING):
        group, width = map(int, part.split("-")[1:])
        decoding.attention_function(kind, group, width, width, width)
        loops.compile_loops(kind)
    elif part == "projections":
        projections.forward_function(kind)
        projections.compile_layouts(of_head)
    else:
        projections.backward_function(kind)
        projections.gradient_function(kind)
        logits.backward_function(kind)
    marker = _marker(part, kind)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _compile_elsewhere(kind: str, ends: Mapping[str, threading.Event]) -> None:
    """Compile parts in another process, whose output names each one that it has compiled."""
    try:
        with start_child(__name__, kind, *ends, log=subprocess.DEVNULL, report=True) as process:
            timer = threading.Timer(COMPILE_S, process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                if end := ends.get(line.decode().strip()):
                    end.set()
            timer.cancel()
        if process.returncode:
            log.info("Functions are not compiled ahead: the process ended with %d.", process.returncode)
    except OSError as error:
        log.info("Functions are not compiled ahead: %s", error)
    finally:
        for end in ends.values():
            end.set()


def _marker(part: str, kind: str) -> Path:
    from tinsmith.engine.cpu.primitives import config  # with Numba

    return Path(config.CACHE_DIR) / f"{part}-{kind}"


def _yield_to_others() -> None:
    """Let checks and requests go first. Linux gives each session a share, and priorities of processes count within."""
    os.nice(LEAST_PRIORITY)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(LEAST_PRIORITY))


def main(kind: str, parts: Sequence[str]) -> None:
    """Entry point of the process."""
    with garbage_collection.paused():
        for part in parts:
            if part.endswith(GRADIENTS):
                _yield_to_others()
            compile_part(part, kind)
            sys.stdout.write(f"{part}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
