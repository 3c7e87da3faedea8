"""The folder of a service that a command starts for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from tinsmith.errors import TinsmithError


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for the block, removed after it. It stays if the block ends with an error that names it, such as one of
    a service whose log is there."""
    folder, is_named = Path(mkdtemp(prefix="tinsmith-")), False
    try:
        yield folder
    except TinsmithError as error:
        is_named = str(folder) in str(error)
        raise
    finally:
        if not is_named:
            rmtree(folder, ignore_errors=True)
