"""The writes of a process to a folder, in order, from a log of strace.

`strace_command` runs a program under strace; `read_trace` turns the log into operations on the folder's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CALLS = (
    "open,openat,creat,close,write,pwrite64,writev,pwritev,pwritev2,lseek,ftruncate,truncate,fsync,fdatasync,"
    "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,copy_file_range,"
    "sendfile,msync,sync,syncfs,sync_file_range"
)
UNMODELLED = ("symlink", "symlinkat", "copy_file_range", "sendfile", "truncate", "sync_file_range")
"""Calls that the service does not use on its data; one on the folder is an error. fallocate is left out: it
reserves room and holds no data."""
_LINE = re.compile(r"^(\d+) +(\d+\.\d+) (.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+|\?)(?:<([^>]*)>)?")
_FD = re.compile(r"^(-?\d+|AT_FDCWD)(?:<([^>]*)>)?(?:\(deleted\))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One change of the folder. Paths are relative to it; "." is the folder itself."""

    kind: Literal["create", "write", "resize", "sync", "rename", "link", "unlink", "mkdir", "rmdir"]
    path: str
    at: float
    """When the call began, in seconds since 1970."""
    to: str = ""
    """New path of a rename or a link."""
    offset: int = 0
    """Position of a write, or size of a resize."""
    data: bytes = b""


def strace_command(log: Path) -> list[str]:
    """The words before a program's own."""
    return [
        *("strace", "--follow-forks", "--seccomp-bpf", "-ttt", "-y", "-xx", "-s", "16777216", "--quiet=all"),
        *("-e", f"trace={CALLS}", "-o", str(log)),
    ]


def read_trace(log: Path, folder: Path) -> list[Operation]:
    """The operations on a folder, in the order in which the calls returned."""
    return list(_Reader(str(folder.resolve())).operations(log))


class _Reader:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._positions: dict[tuple[str, str], int] = {}
        """(descriptor, path) -> position of the next write."""
        self._sizes: dict[str, int] = {}
        self._appending: set[tuple[str, str]] = set()

    def operations(self, log: Path) -> Iterator[Operation]:
        unfinished: dict[str, tuple[float, str]] = {}
        with log.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                match = _LINE.match(line)
                if match is None:
                    continue
                thread, at, text = match[1], float(match[2]), match[3]
                if text.endswith("<unfinished ...>"):
                    unfinished[thread] = (at, text.removesuffix("<unfinished ...>"))
                    continue
                if resumed := re.match(r"^<\.\.\. \w+ resumed>(.*)$", text):
                    at, start = unfinished.pop(thread)
                    text = start + resumed[1]
                if call := _CALL.match(text):
                    yield from self._call(call, at)

    def _call(self, call: re.Match[str], at: float) -> Iterator[Operation]:
        name, result = call[1], int(call[3], 0) if call[3] != "?" else -1
        if result < 0:
            return
        words = _split(call[2])
        if name in ("open", "openat", "creat"):
            yield from self._open(name, words, str(result), at)
        elif name in ("write", "pwrite64", "lseek", "ftruncate", "fsync", "fdatasync", "writev", "pwritev", "pwritev2"):
            descriptor, path = _descriptor(words[0])
            if self._relative(path) is not None:
                yield from self._file_call(name, descriptor, path, words, result, at)
        else:
            yield from self._name_call(name, words, at)

    def _open(self, name: str, words: list[str], descriptor: str, at: float) -> Iterator[Operation]:
        path = _join(words[0], words[1]) if name == "openat" else _text(words[0])
        flags = words[2] if name == "openat" else words[1] if name == "open" else "O_CREAT|O_TRUNC"
        relative = self._relative(path)
        if relative is None:
            return
        key = (descriptor, path)
        self._positions[key] = 0
        self._appending.discard(key)
        if "O_APPEND" in flags:
            self._appending.add(key)
        if "O_CREAT" in flags and path not in self._sizes:
            self._sizes[path] = 0
            yield Operation(kind="create", path=relative, at=at)
        elif "O_TRUNC" in flags:
            self._sizes[path] = 0
            yield Operation(kind="resize", path=relative, at=at)

    def _file_call(
        self, name: str, descriptor: str, path: str, words: list[str], result: int, at: float
    ) -> Iterator[Operation]:
        relative, key = self._relative(path), (descriptor, path)
        assert relative is not None
        if name in ("fsync", "fdatasync"):
            yield Operation(kind="sync", path=relative, at=at)
        elif name == "ftruncate":
            self._sizes[path] = int(words[1])
            yield Operation(kind="resize", path=relative, offset=int(words[1]), at=at)
        elif name == "lseek":
            self._positions[key] = result
        elif name in ("write", "pwrite64"):
            data = _bytes(words[1])[:result]
            offset = int(words[3]) if name == "pwrite64" else self._position(key)
            if name == "write":
                self._positions[key] = offset + result
            self._sizes[path] = max(self._sizes.get(path, 0), offset + len(data))
            yield Operation(kind="write", path=relative, offset=offset, data=data, at=at)
        else:
            raise NotImplementedError(f"{name} on {relative}")

    def _position(self, key: tuple[str, str]) -> int:
        return self._sizes.get(key[1], 0) if key in self._appending else self._positions.get(key, 0)

    def _name_call(self, name: str, words: list[str], at: float) -> Iterator[Operation]:
        if name in ("renameat", "renameat2", "linkat"):
            words = [_join(words[0], words[1]), _join(words[2], words[3])]
        elif name in ("unlinkat", "mkdirat"):
            name = "rmdir" if "AT_REMOVEDIR" in words[-1] else name
            words = [_join(words[0], words[1])]
        elif name in ("rename", "link", "unlink", "mkdir", "rmdir"):
            words = [_text(word) for word in words[: 2 if name in ("rename", "link") else 1]]
        elif name in UNMODELLED and any(self._folder in _decode(word) for word in words):
            raise NotImplementedError(f"{name} of {words[0]}")
        else:
            return
        kind = name.removesuffix("2").removesuffix("at")
        relative = self._relative(words[0])
        to = self._relative(words[1]) if kind in ("rename", "link") else ""
        if relative is None or to is None:
            return
        if kind in ("rename", "link"):
            self._move_sizes(words[0], words[1], keep=kind == "link")
        elif kind in ("unlink", "rmdir"):
            self._sizes.pop(words[0], None)
        yield Operation(kind=kind, path=relative, to=to, at=at)  # type: ignore[arg-type]

    def _move_sizes(self, source: str, to: str, *, keep: bool) -> None:
        for path in [path for path in self._sizes if path == source or path.startswith(f"{source}/")]:
            size = self._sizes[path] if keep else self._sizes.pop(path)
            self._sizes[to + path.removeprefix(source)] = size

    def _relative(self, path: str) -> str | None:
        path = path.removesuffix("(deleted)").rstrip()
        if path == self._folder:
            return "."
        return path.removeprefix(f"{self._folder}/") if path.startswith(f"{self._folder}/") else None


def _split(arguments: str) -> list[str]:
    """The arguments of a call: commas inside of strings and brackets do not separate."""
    return [
        word.strip() for word in re.findall(r'(?:"[^"]*"(?:\.\.\.)?|\[[^\]]*\]|\{[^}]*\}|<[^>]*>|[^,"])+', arguments)
    ]


def _descriptor(word: str) -> tuple[str, str]:
    match = _FD.match(word)
    return (match[1], _decode(match[2] or "")) if match else ("", "")


def _join(folder: str, name: str) -> str:
    path = _text(name)
    return path if path.startswith("/") else f"{_descriptor(folder)[1]}/{path}"


def _text(word: str) -> str:
    return _bytes(word).decode()


def _bytes(word: str) -> bytes:
    content = word[word.index('"') + 1 : word.rindex('"')]
    return bytes.fromhex(content.replace("\\x", ""))


def _decode(text: str) -> str:
    return re.sub(r"(?:\\x[0-9a-f]{2})+", lambda match: bytes.fromhex(match[0].replace("\\x", "")).decode(), text)
