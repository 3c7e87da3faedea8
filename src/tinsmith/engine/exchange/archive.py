"""Adapter folders as tar archives: what a server sends and receives. Imports no torch: the API process uses it."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from tinsmith.errors import BadRequest

CONFIG, WEIGHTS, MOMENTS = "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"


def pack(folder: Path, archive: Path) -> None:
    """Write the adapter's files of a folder into a tar archive."""
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in (CONFIG, WEIGHTS, MOMENTS):
            if (folder / name).is_file():
                tar.add(folder / name, name)


def unpack(archive: Path, folder: Path) -> None:
    """Extract the adapter's files of a tar archive into a folder; other files are left out.

    Raises BadRequest for what is no archive, or holds no adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                content = tar.extractfile(member) if member.isreg() and name in (CONFIG, WEIGHTS, MOMENTS) else None
                if content is not None:
                    with content, (folder / name).open("wb") as file:
                        shutil.copyfileobj(content, file, 1 << 20)
    except (tarfile.TarError, EOFError) as error:
        raise BadRequest(f"The archive cannot be read: {error}.", "Send an uncompressed tar archive.") from error
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise BadRequest(f"The archive holds no {' and no '.join(missing)}.", f"It needs {CONFIG} and {WEIGHTS}.")
