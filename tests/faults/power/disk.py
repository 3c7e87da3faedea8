"""What a disk may hold after a power cut, given the operations on a folder until then.

Only a sync is certain. Content that was written since a file's last sync is lost or kept for each 4 KiB page by
itself, and a change of a file's size likewise. Of the names in a directory, the changes since the directory's last sync
are kept up to any one of them, in order: syncing a file does not sync its name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults.power.trace import Operation

PAGE = 4096
Losses = Literal["unsynced", "nothing", "some"]
"""What of the unsynced operations is lost: all, none, or a random part."""


@dataclass(slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data) of writes since the last sync; (size, None) of changes of the size."""

    def change(self, offset: int, data: bytes | None) -> None:
        _apply(self.content, offset, data)
        self.pending.append((offset, data))

    def sync(self) -> None:
        self.synced, self.pending = bytes(self.content), []

    def after_cut(self, losses: Losses, rng: random.Random) -> bytes:
        if losses == "nothing":
            return bytes(self.content)
        content = bytearray(self.synced)
        for offset, data in self.pending if losses == "some" else ():
            if data is None:
                if rng.random() < 0.5:
                    _apply(content, offset, None)
                continue
            for start, page in _pages(offset, data):
                if rng.random() < 0.5:
                    _apply(content, start, page)
        return bytes(content)


@dataclass(slots=True)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    states: list[dict[str, _File | _Folder]] = field(default_factory=list)
    """The names after each change since the last sync."""

    def set(self, **changes: _File | _Folder | None) -> None:
        """Add names, or with None remove them, in one change."""
        self.names |= {name: node for name, node in changes.items() if node is not None}
        for name, node in changes.items():
            if node is None:
                self.names.pop(name, None)
        self.states.append(dict(self.names))

    def sync(self) -> None:
        self.synced, self.states = dict(self.names), []

    def after_cut(self, losses: Losses, rng: random.Random) -> dict[str, _File | _Folder]:
        if losses == "nothing":
            return self.names
        return rng.choice([self.synced, *self.states]) if losses == "some" else self.synced


class Disk:
    """A folder whose own name is durable, and the operations on it so far."""

    def __init__(self) -> None:
        self._root = _Folder()

    def apply(self, operations: Iterable[Operation]) -> None:
        """Carry out operations."""
        for operation in operations:
            self._apply(operation)

    def cut(self, to: Path, losses: Losses, rng: random.Random) -> None:
        """Write to an empty folder what the disk may hold after a power cut now."""
        _write(self._root, to, losses, rng)

    def _apply(self, operation: Operation) -> None:
        if operation.kind == "sync" and operation.path == ".":
            self._root.sync()
            return
        folder, name = self._parent(operation.path)
        node = folder.names.get(name)
        if operation.kind == "create":
            if node is None:
                folder.set(**{name: _File()})
        elif operation.kind == "mkdir":
            folder.set(**{name: _Folder()})
        elif operation.kind in ("unlink", "rmdir"):
            folder.set(**{name: None})
        elif node is None:
            assert operation.kind in ("write", "sync", "resize"), operation  # of a file that has been deleted
        elif operation.kind == "sync":
            node.sync()
        elif operation.kind in ("rename", "link"):
            self._move(folder, name, node, operation)
        else:
            assert isinstance(node, _File), operation
            node.change(operation.offset, operation.data if operation.kind == "write" else None)

    def _move(self, folder: _Folder, name: str, node: _File | _Folder, operation: Operation) -> None:
        target, new_name = self._parent(operation.to)
        if operation.kind == "link":
            target.set(**{new_name: node})
        elif target is folder:
            folder.set(**{new_name: node, name: None})
        else:
            target.set(**{new_name: node})
            folder.set(**{name: None})

    def _parent(self, path: str) -> tuple[_Folder, str]:
        *folders, name = path.split("/")
        folder = self._root
        for part in folders:
            node = folder.names[part]
            assert isinstance(node, _Folder), path
            folder = node
        return folder, name


def _write(folder: _Folder, to: Path, losses: Losses, rng: random.Random) -> None:
    to.mkdir(exist_ok=True)
    for name, node in sorted(folder.after_cut(losses, rng).items()):
        if isinstance(node, _Folder):
            _write(node, to / name, losses, rng)
        elif not name.endswith("-shm"):  # an index in memory, which SQLite makes again
            (to / name).write_bytes(node.after_cut(losses, rng))


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write data at an offset, or without data change the size."""
    size = offset if data is None else offset + len(data)
    if size > len(content):
        content.extend(bytes(size - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset:size] = data


def _pages(offset: int, data: bytes) -> Iterable[tuple[int, bytes]]:
    """The parts of a write that lie on different pages."""
    end = offset + len(data)
    while offset < end:
        stop = min(end, (offset // PAGE + 1) * PAGE)
        yield offset, data[: stop - offset]
        data, offset = data[stop - offset :], stop
