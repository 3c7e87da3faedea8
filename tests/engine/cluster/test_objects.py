"""Object storage: whole or not at all, checked on the way back, in a shared folder and in an S3 server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tinsmith.engine.adapters.store import MANIFEST, Manifest, MissingObjectError, ObjectStore, StoreUnavailableError
from tinsmith.errors import ConfigError


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.cluster)])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return ObjectStore((tmp_path / "shared").as_uri())
    request.getfixturevalue("s3_server")
    return ObjectStore(f"s3://bucket/{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter's folder, of files large and small."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(3 << 20))
    (folder / "adapter_config.json").write_text("{}")
    (folder / "empty").touch()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_folder_comes_back_as_it_was(objects: ObjectStore, folder: Path, tmp_path: Path) -> None:
    objects.check()
    digest = objects.publish(folder)
    assert objects.fetch(digest, tmp_path / "copy") == (3 << 20) + 2
    assert content(tmp_path / "copy") == content(folder)
    assert objects.publish(tmp_path / "copy") == digest, "the same content has the same name"
    (folder / "adapter_config.json").write_text("{ }")
    assert objects.publish(folder) != digest
    objects.delete(digest)
    objects.delete(digest)
    assert not objects.exists(digest)
    with pytest.raises(MissingObjectError):
        objects.fetch(digest, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def interrupt(objects: ObjectStore, folder: Path) -> str:
    """Publish a folder in a process that is killed before the manifest is stored. Returns the digest."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt  # the process ends here

    with pytest.MonkeyPatch.context() as patch:
        for place in ("pipe_file", "cat_file"):
            patch.setattr(objects._files, place, fail)
        patch.setattr("pathlib.Path.write_bytes", fail)
        patch.setattr("tinsmith.atomic.shutil.rmtree", lambda *_, **__: None)  # nor does it clean up
        with pytest.raises(KeyboardInterrupt):
            objects.publish(folder)
    return Manifest.of(folder).digest


def test_interrupted_publication_can_be_repeated(objects: ObjectStore, folder: Path, tmp_path: Path) -> None:
    """Fails with the manifest before the files."""
    digest = interrupt(objects, folder)
    assert not objects.exists(digest)
    assert objects.publish(folder) == digest
    objects.fetch(digest, tmp_path / "copy")


def test_interrupted_publication_can_be_deleted(objects: ObjectStore, folder: Path) -> None:
    """Fails if only files that a manifest names are deleted: they would take room for ever."""
    digest = interrupt(objects, folder)
    assert objects._files.find(objects._root)
    objects.delete(digest)
    assert not objects._files.find(objects._root)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", MANIFEST])
def test_damaged_object_is_refused(objects: ObjectStore, folder: Path, tmp_path: Path, name: str) -> None:
    """Fails without the comparison of checksums."""
    digest = objects.publish(folder)
    path = objects._path(digest, name)
    stored = bytearray(objects._files.cat_file(path))
    stored[len(stored) // 2] ^= 1
    objects._files.pipe_file(path, bytes(stored))
    with pytest.raises(MissingObjectError, match="damaged"):
        objects.fetch(digest, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file:///.*file/below.*Create the bucket or folder"):
        ObjectStore((tmp_path / "file" / "below").as_uri()).check()
    with pytest.raises(ConfigError, match=r"Install tinsmith\[cluster\]"):
        ObjectStore("nothing://bucket")


@pytest.mark.cluster
def test_missing_bucket_and_a_server_that_is_away(
    s3_server: tuple[str, subprocess.Popen[bytes]], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="Create the bucket"):
        ObjectStore("s3://nowhere/x").check()
    objects = ObjectStore("s3://bucket/away")
    digest = objects.publish(folder)
    s3_server[1].kill()
    s3_server[1].wait()
    for call in (lambda: objects.publish(folder), lambda: objects.fetch(digest, tmp_path / "copy")):
        with pytest.raises(StoreUnavailableError):
            call()
