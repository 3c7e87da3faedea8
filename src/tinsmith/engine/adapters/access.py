"""Whether the machines of slots see the data folder, or reach the object store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tinsmith.engine.processes.slots import Slot, read_file
from tinsmith.errors import ConfigError


async def check_folder(slots: Sequence[Slot], folder: Path) -> None:
    """Raises ConfigError if a machine does not see the files that this one writes into a folder."""
    blind = await without_sight(slots, folder)
    if blind:
        raise ConfigError(
            f"{blind} does not see the folder {folder}, where checkpoints and versions are written.",
            "Give a --data folder that all machines share, at the same path, or a --store that all of them reach.",
        )


async def without_sight(slots: Sequence[Slot], folder: Path) -> str:
    """A machine that does not see the files that this one writes into a folder; empty if all do."""
    nonce = os.urandom(16)
    file = folder / f".shared-{nonce.hex()}"
    file.write_bytes(nonce)
    try:
        for slot in slots:
            if await slot.run(read_file, file.absolute(), len(nonce)) != nonce:
                return slot.machine
    finally:
        file.unlink()
    return ""


async def check_store(slots: Sequence[Slot], url: str) -> None:
    """Raises ConfigError if a machine cannot write, read and delete a file of an object store."""
    for slot in {slot.machine: slot for slot in slots}.values():
        if reason := await slot.run(fault_of_store, url):
            raise ConfigError(
                f"{slot.machine} cannot use the store: {reason}",
                "Set its credentials on every machine before `ray start`; install tinsmith[cluster] there.",
            )


def fault_of_store(url: str) -> str:
    """Why this machine cannot use an object store; empty if it can."""
    from tinsmith.engine.adapters.store import ObjectStore  # with fsspec

    try:
        ObjectStore(url).check()
    except ConfigError as error:
        return str(error)
    return ""
