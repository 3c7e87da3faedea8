"""Text of data files, by lines. gzip, bzip2, xz and Zstandard are decompressed, whatever the file is called.

Text is UTF-8; UTF-16 and UTF-32 are read if the file begins with a byte order mark. Lines end with LF, CRLF or CR.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from io import BufferedIOBase, BufferedReader, RawIOBase, StringIO
from pathlib import Path
from typing import IO, Any, cast

from typing_extensions import override
from zstandard import ZstdDecompressor, ZstdError

from tinsmith.errors import ConfigError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Extensions of compressed files, which come after that of the format."""

_FAULTS_OF_COMPRESSION = (EOFError, zlib.error, lzma.LZMAError, ZstdError, gzip.BadGzipFile)
_HEAD = 64
_RAW = "Download the file itself, not the page that shows it."
_WIDE_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the beginning of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_OTHER_KINDS = {
    b"PAR1": ("a Parquet file, not text", "Set type to files, and name the file *.parquet."),
    b"ARROW1": ("an Arrow file, not text", "Set type to files, and name the file *.arrow."),
    b"PK\x03\x04": (
        "a zip archive or a workbook, not text",
        "Unpack it; save the sheet of a workbook as CSV in UTF-8.",
    ),
    b"SQLite format 3": ("an SQLite database, not text", "Set type to sql, with its url and table."),
    b"version https://git-lfs": ("a pointer of Git LFS, not the data", "Fetch the data: git lfs pull."),
    b"<!doctype html": ("a web page, not data", _RAW),
    b"<html": ("a web page, not data", _RAW),
}
"""How files that are not text with rows begin: what they are, and what to do."""


def first_bytes(file: Path) -> bytes:
    """The first bytes of a file, by which its kind is known. Raises ConfigError if it cannot be read."""
    try:
        with file.open("rb") as stored:
            return stored.read(_HEAD)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.", "Check its permissions.") from error


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a file with their ends. Raises ConfigError that names the file and the line."""
    try:
        with file.open("rb") as stored:
            yield from _decoded(file, _decompressed(stored))
    except _FAULTS_OF_COMPRESSION as error:
        raise ConfigError(
            f"{file} cannot be decompressed: {error}.", "It is incomplete or damaged; copy it again."
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.", "Check its permissions.") from error


def _decompressed(stored: BufferedReader) -> IO[bytes] | BufferedIOBase:
    start = stored.peek(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(stored)
    if start.startswith(b"BZh"):
        return bz2.open(stored)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.open(stored)
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        return BufferedReader(_Zstandard(stored))
    return stored


class _Zstandard(RawIOBase):
    """The text of Zstandard frames. Unlike the reader of the package, it raises EOFError if the last one is cut."""

    def __init__(self, stored: IO[bytes]) -> None:
        self._stored, self._frame, self._text = stored, ZstdDecompressor().decompressobj(), b""

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any, /) -> int:
        while not self._text:
            more = (self._frame.unused_data if self._frame.eof else b"") or self._stored.read(1 << 16)
            if not more and not self._frame.eof:
                raise EOFError("it ends inside a frame")
            if not more:
                return 0
            if self._frame.eof:
                self._frame = ZstdDecompressor().decompressobj()
            self._text = self._frame.decompress(more)
        count = min(len(buffer), len(self._text))
        buffer[:count], self._text = self._text[:count], self._text[count:]
        return count


def _decoded(file: Path, stream: IO[bytes] | BufferedIOBase) -> Iterator[str]:
    first = stream.readline()
    refuse_other_kinds(file, first)
    encoding = next((name for mark, name in _WIDE_ENCODINGS if first.startswith(mark)), "")
    if encoding:
        yield from StringIO(_wide_text(file, first + stream.read(), encoding), newline="")
        return
    line, number = first.removeprefix(codecs.BOM_UTF8), 0
    while line:
        for text in _split(_text(file, number + 1, line)):
            number += 1
            yield text
        line = stream.readline()


def refuse_other_kinds(file: Path, begin: bytes, but: bytes = b"") -> None:
    """Raise ConfigError if a file that begins so is of a kind without rows of text, but for the kind that begins with
    `but`."""
    for start, (kind, hint) in _OTHER_KINDS.items():
        if start != but and begin[:_HEAD].lower().startswith(start.lower()):
            raise ConfigError(f"{file} is {kind}.", hint)


def _split(line: str) -> Iterator[str]:
    """The lines of a text that ends with LF, if there are CR in it."""
    if "\r" in line:
        yield from StringIO(line, newline="")
    else:
        yield line


def _text(file: Path, number: int, line: bytes) -> str:
    if b"\0" in line:
        raise ConfigError(
            f"{file}, line {number} contains a byte 0: the file is not text in UTF-8.",
            f"If it is UTF-16, convert it: iconv -f UTF-16LE -t UTF-8 {file} > utf8-{file.name}",
        )
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}, line {number} is not UTF-8: byte {line[error.start]:#04x} at position {error.start + 1}.",
            f"Save the file as UTF-8, such as: iconv -f WINDOWS-1252 -t UTF-8 {file} > utf8-{file.name}",
        ) from error


def _wide_text(file: Path, content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        before = content[: error.start].decode(encoding, "replace")
        raise ConfigError(
            f"{file}, line {before.count(chr(10)) + 1} is not {encoding.upper()}, as its byte order mark says.",
            "Save the file as UTF-8.",
        ) from error


def unzipped_name(file: Path) -> Path:
    """The name of a file without the extension of its compression."""
    return cast(Path, file.with_suffix("")) if file.suffix.lower() in COMPRESSIONS else file
