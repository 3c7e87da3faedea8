"""Age encryption: what comes out, the other side of the library opens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyrage
import pytest

from tests.service.inprocess import api
from tinsmith.errors import BadRequest
from tinsmith.service.encryption import encrypt, recipients
from tinsmith.service.storage.payloads import encode_operation, queued_request
from tinsmith.service.storage.records import SaveExternal

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@rust"


def test_each_recipient_opens_every_file(tmp_path: Path) -> None:
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


def test_what_cannot_be_encrypted_leaves_nothing(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    (plain / "no file").mkdir(parents=True)
    (plain / "a.json").write_bytes(b"{}")
    with pytest.raises(Exception, match="directory"):
        encrypt(plain, tmp_path / "to", [SSH])
    assert list(tmp_path.iterdir()) == [plain]


@pytest.mark.parametrize("bad", ["age1nonsense", "ssh-ed25519 AAAA", "ssh-dss AAAA", "", "AGE-SECRET-KEY-1"])
def test_what_is_no_public_key_is_named(bad: str) -> None:
    with pytest.raises(BadRequest, match=r"age_encryption_recipients\[1\] is not an age or SSH public key"):
        recipients([SSH, bad])


def test_what_was_promised_is_saved_after_a_restart_and_nothing_stays_in_the_clear(tmp_path: Path) -> None:
    reader = pyrage.x25519.Identity.generate()
    work = SaveExternal(name="late", recipients=[str(reader.to_public())])

    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            row = queued_request(f"{model}:1", "local", model, 1, 1, work)
            await on.service.store.accept(row, encode_operation(work))
        left = tmp_path / "checkpoints" / ".half.plain"
        left.mkdir()
        (left / "adapter_model.safetensors").write_bytes(b"in the clear")
        async with api(tmp_path) as on:
            result = (await on.result({"request_id": f"{model}:1"})).json()
            assert result["path"] == f"tinker://{model}/external_weights/late"
            [folder] = (tmp_path / "checkpoints").iterdir()
            assert result["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
            sealed = (folder / "adapter_config.json.age").read_bytes()
            assert json.loads(pyrage.decrypt(sealed, [reader]))["r"] == 4
            again = await on.post("save_weights_external", {"model_id": model, "seq_id": 1, "path": "late"})
            assert again.json()["request_id"] == f"{model}:1"

    asyncio.run(main())


def test_there_are_at_most_ten() -> None:
    with pytest.raises(BadRequest, match="11 age_encryption_recipients"):
        recipients([SSH] * 11)
