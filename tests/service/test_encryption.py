"""age encryption of external checkpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyrage
import pytest

from tests.service.support.inprocess import api
from tinsmith.errors import BadRequest
from tinsmith.service.encryption import encrypt, recipients
from tinsmith.service.storage.payloads import encode_operation, queued_request
from tinsmith.service.storage.records import SaveExternal

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@rust"


def test_each_recipient_decrypts_every_file(tmp_path: Path) -> None:
    plain, to = tmp_path / "plain", tmp_path / "to"
    plain.mkdir()
    (plain / "a.json").write_bytes(b"{}")
    (plain / "b.safetensors").write_bytes(b"x" * 200_000)
    readers = [pyrage.x25519.Identity.generate() for _ in range(2)]
    size = encrypt(plain, to, [*(str(reader.to_public()) for reader in readers), SSH])
    assert sorted(file.name for file in to.iterdir()) == ["a.json.age", "b.safetensors.age"]
    assert size == sum(file.stat().st_size for file in to.iterdir())
    for reader in readers:
        assert pyrage.decrypt((to / "b.safetensors.age").read_bytes(), [reader]) == b"x" * 200_000
    assert b"x" * 100 not in (to / "b.safetensors.age").read_bytes()


def test_failed_encryption_leaves_no_files(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    (plain / "no file").mkdir(parents=True)
    (plain / "a.json").write_bytes(b"{}")
    with pytest.raises(Exception, match="directory"):
        encrypt(plain, tmp_path / "to", [SSH])
    assert list(tmp_path.iterdir()) == [plain]


@pytest.mark.parametrize("bad", ["age1nonsense", "ssh-ed25519 AAAA", "ssh-dss AAAA", "", "AGE-SECRET-KEY-1"])
def test_rejects_invalid_public_keys_by_index(bad: str) -> None:
    with pytest.raises(BadRequest, match=r"age_encryption_recipients\[1\] is not an age or SSH public key"):
        recipients([SSH, bad])


def test_queued_external_save_is_encrypted_after_a_restart(tmp_path: Path) -> None:
    reader = pyrage.x25519.Identity.generate()
    work = SaveExternal(name="late", recipients=[str(reader.to_public())])

    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            row = queued_request(f"{model}:1", "local", model, 1, 1, work)
            await app.service.store.accept(row, encode_operation(work))
        left = tmp_path / "checkpoints" / ".half.plain"
        left.mkdir()
        (left / "adapter_model.safetensors").write_bytes(b"in the clear")
        async with api(tmp_path) as app:
            result = (await app.result({"request_id": f"{model}:1"})).json()
            assert result["path"] == f"tinker://{model}/external_weights/late"
            [folder] = (tmp_path / "checkpoints").iterdir()
            assert result["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
            sealed = (folder / "adapter_config.json.age").read_bytes()
            assert json.loads(pyrage.decrypt(sealed, [reader]))["r"] == 4
            again = await app.post("save_weights_external", {"model_id": model, "seq_id": 1, "path": "late"})
            assert again.json()["request_id"] == f"{model}:1"

    asyncio.run(main())


def test_rejects_more_than_ten_recipients() -> None:
    with pytest.raises(BadRequest, match="11 age_encryption_recipients"):
        recipients([SSH] * 11)
