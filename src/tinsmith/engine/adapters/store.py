"""Object storage: folders of files, published whole under the digest of their content. Any store that fsspec reaches.

    ROOT/objects/DIGEST/{adapter_model.safetensors, …, manifest.json}

The manifest has the size and the sha256 of each file and is written last: an object without a manifest does not exist.
The digest is that of the manifest, so the same content has the same name and may be published twice. Nothing is
renamed, and nothing is listed except to delete what an interrupted upload has left. A `file://` root is a folder that
several machines share. All calls block.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tinsmith.atomic import atomic_folder, remove_unfinished
from tinsmith.checksums import Checksum, checksum
from tinsmith.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_OBSTORE = {"s3", "gs", "az", "abfs"}
"""Protocols that obstore serves where it is installed: one library without dependencies for all of them."""


class MissingObjectError(EngineError):
    """The store has no object of this digest, or not all of its files."""


class StoreUnavailableError(EngineError):
    """The store does not answer, or refuses; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of an object by name."""

    files: dict[str, Checksum]

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """The manifest of a folder's files, which are read for it. Raises OSError."""
        return cls({file.name: checksum(file) for file in sorted(folder.iterdir()) if file.is_file()})

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The manifest from its bytes."""
        return cls({name: Checksum(**file) for name, file in json.loads(content)["files"].items()})

    def encode(self) -> bytes:
        """Its bytes, equal for equal files."""
        files = {name: asdict(file) for name, file in self.files.items()}
        return json.dumps({"format": FORMAT, "files": files}, sort_keys=True, indent=1).encode()

    @property
    def digest(self) -> str:
        """The name of the object: 32 hexadecimal digits."""
        return _digest(self.encode())


class ObjectStore:
    """The objects below a URL, such as s3://bucket/prefix, gs://…, file:///shared/folder.

    Credentials come from the environment, as the store's own tools read them. Raises ConfigError for a URL that no
    installed library can open.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        protocol = url.partition("://")[0] if "://" in url else "file"
        if protocol in _OBSTORE:
            with suppress(ImportError):
                from obstore.fsspec import register  # pyright: ignore[reportMissingImports]

                register(protocol)
        try:
            self._files, root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"The object store {url} cannot be opened: {error}",
                "Install tinsmith[cluster] for s3://, gs:// and az://, or the package of fsspec that serves it.",
            ) from error
        self._root = root.rstrip("/")

    def check(self) -> None:
        """Write a file, read it and delete it. Raises ConfigError with the store's answer if that fails."""
        name, content = f"{self._root}/.check-{uuid.uuid4().hex}", uuid.uuid4().bytes
        try:
            with self._translated("be written"):
                self._make_folder(self._root)
                self._files.pipe_file(name, content)
                read = self._files.cat_file(name)
                self._files.rm_file(name)
        except EngineError as error:
            raise ConfigError(error.message, "Create the bucket or folder; check its credentials.") from error
        if read != content:
            raise ConfigError(f"The object store {self.url} returns other bytes than were written.", "Name another.")

    def publish(self, folder: Path, manifest: Manifest | None = None) -> str:
        """Store a folder's files, unless the store has them. Returns the digest.

        Raises StoreUnavailableError; OSError if a file cannot be read.
        """
        manifest = manifest or Manifest.of(folder)
        digest = manifest.digest
        if not self.exists(digest):
            with self._translated(f"store {digest}"):
                if isinstance(self._files, LocalFileSystem):
                    _copy_whole(folder, manifest, Path(self._path(digest)))
                else:
                    for name in manifest.files:
                        self._files.put_file(str(folder / name), self._path(digest, name))
                    self._files.pipe_file(self._path(digest, MANIFEST), manifest.encode())
        return digest

    def exists(self, digest: str) -> bool:
        """Whether the store has the object."""
        with self._translated(f"say whether it has {digest}"):
            return self._files.exists(self._path(digest, MANIFEST))

    def fetch(self, digest: str, to: Path) -> int:
        """Copy an object's files into the folder `to`, which is there whole or not at all. Returns its size in bytes.

        Raises MissingObjectError, also for files that are not those of the digest; StoreUnavailableError.
        """
        files = self.manifest(digest).files
        with atomic_folder(to) as temporary:
            for name, expected in files.items():
                with self._translated(f"read {name} of {digest}"):
                    self._files.get_file(self._path(digest, name), str(temporary / name))
                if checksum(temporary / name) != expected:
                    raise MissingObjectError(
                        f"{name} of object {digest} in {self.url} is damaged: its size or checksum differs.",
                        "Restore it from a backup of the store.",
                    )
        return sum(file.bytes for file in files.values())

    def manifest(self, digest: str) -> Manifest:
        """The manifest of an object. Raises MissingObjectError, StoreUnavailableError."""
        with self._translated(f"read {digest}"):
            content = self._files.cat_file(self._path(digest, MANIFEST))
        assert isinstance(content, bytes)
        if _digest(content) != digest:
            raise MissingObjectError(
                f"The manifest of object {digest} in {self.url} is damaged.", "Restore it from a backup of the store."
            )
        return Manifest.decode(content)

    def delete(self, digest: str) -> None:
        """Delete an object, its manifest last, so that a deletion that was interrupted can be repeated.

        What an upload has left that was interrupted, which has no manifest yet, is deleted too.
        """
        try:
            names = list(self.manifest(digest).files)
        except MissingObjectError:
            names = self._names_in(digest)
        for name in [*names, MANIFEST]:
            with suppress(MissingObjectError), self._translated(f"delete {name} of {digest}"):
                self._files.rm_file(self._path(digest, name))
        if isinstance(self._files, LocalFileSystem):
            shutil.rmtree(self._path(digest), ignore_errors=True)
            remove_unfinished(Path(self._path(digest)))

    def _names_in(self, digest: str) -> list[str]:
        """Names of the files of an object as the store lists them."""
        with self._translated(f"list {digest}"):
            return [name.rpartition("/")[2] for name in self._files.find(self._path(digest))]

    def _make_folder(self, path: str) -> None:
        if isinstance(self._files, LocalFileSystem):
            Path(path).mkdir(parents=True, exist_ok=True)

    def _path(self, digest: str, name: str = "") -> str:
        return "/".join(part for part in (self._root, "objects", digest, name) if part)

    @contextmanager
    def _translated(self, work: str) -> Iterator[None]:
        """Stores have errors of their own, which need not be OSErrors."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObjectError(f"The object store {self.url} could not {work}: it is not there.") from error
        except EngineError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0][:300] or type(error).__name__
            raise StoreUnavailableError(f"The object store {self.url} could not {work}: {reason}") from error


def _copy_whole(folder: Path, manifest: Manifest, target: Path) -> None:
    """On a file system the object is renamed into place and synced: other machines see all of it or nothing."""
    with atomic_folder(target) as temporary:
        for name in manifest.files:
            shutil.copyfile(folder / name, temporary / name)
        (temporary / MANIFEST).write_bytes(manifest.encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
