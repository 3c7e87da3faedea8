"""Backups of a running server, restored on another folder, where its clients continue."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.service.conftest import datum
from tests.service.support.process import child, free_port
from tinsmith.atomic import link_file
from tinsmith.checksums import checksum
from tinsmith.service.backup.create import back_up
from tinsmith.service.backup.restore import restore
from tinsmith.service.backup.verify import verify
from tinsmith.service.config import ServeConfig

pytestmark = pytest.mark.usefixtures("forked_programs")

TOKENS = [5, 6, 7, 8, 9]
PROMPT = types.ModelInput.from_ints(TOKENS)


def losses(model: tinker.TrainingClient, steps: range) -> list[float]:
    """Losses of these steps."""
    results = []
    for step in steps:
        passed = model.forward_backward([datum([step, *TOKENS], weights=[1.0] * 5)], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=0.02))
        results.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return results


def train_until(stopped: threading.Event, url: str) -> None:
    """Train, save and sample: each turn captures states, and deletes those of the turn before."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-x")
    model = client.create_lora_training_client("toy", rank=4).result()
    turn = 0
    while not stopped.is_set():
        turn += 1
        losses(model, range(2))
        model.save_state("last", overwrite=True).result()
        model.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()
    client.close("success").result()


def faults(folder: Path, database: str | None = None) -> dict[str, dict[str, str]]:
    """What `verify` finds, without the names of folders that no record names."""
    return {check.name: check.faults for check in verify(folder, database) if check.faults and not check.is_harmless}


def test_client_continues_on_a_restored_backup(tmp_path: Path) -> None:
    """Fails when `_collect` copies the database before it links folders, or links them in another transaction."""
    port, data, restored = free_port(), tmp_path / "data", tmp_path / "restored"
    config = ServeConfig(models=("toy",), engine="fake", data=data, port=port, api_key="tml-x", capture_every=1)
    with ExitStack() as stack:
        server = stack.enter_context(child(config))
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        straight = client.create_lora_training_client("toy", rank=4, seed=1).result()
        expected = losses(straight, range(8))
        moved = client.create_lora_training_client("toy", rank=4, seed=1).result()
        assert losses(moved, range(4)) == expected[:4]
        sampler = moved.save_weights_and_get_sampling_client().result()
        sampled = sampler.compute_logprobs(PROMPT).result()

        stopped = threading.Event()
        others = [threading.Thread(target=train_until, args=(stopped, server.url)) for _ in range(2)]
        for other in others:
            other.start()
        for number in range(4):
            made = back_up(data, None, tmp_path / "backup")
            assert made.manifest.missing == []
            assert faults(tmp_path / "backup") == {}, number
        assert faults(data) == {}
        stopped.set()
        for other in others:
            other.join(240)
        server.kill()

        restore(tmp_path / "backup", restored, None)
        assert faults(restored) == {}
        stack.enter_context(child(config.model_copy(update={"data": restored})))
        assert losses(moved, range(4, 8)) == expected[4:]
        assert sampler.compute_logprobs(PROMPT).result() == sampled


def test_unchanged_files_are_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when `_copy` hashes or copies every file."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    config = ServeConfig(models=("toy",), engine="fake", data=data, api_key="tml-x", port=free_port())
    with child(config) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        model.save_state("first").result()
        on_other_file_system(monkeypatch)
        back_up(data, None, backup)
        inodes = {file.name: file.stat().st_ino for file in backup.glob("checkpoints/*/*")}
        model.save_state("second").result()
        hashed: list[str] = []
        monkeypatch.setattr(
            "tinsmith.service.backup.create.checksum", lambda file: (hashed.append(file.parent.name), checksum(file))[1]
        )
        made = back_up(data, None, backup)
    first = {file.name for file in backup.glob("checkpoints/*/*") if file.stat().st_ino in inodes.values()}
    assert first == inodes.keys()
    assert made.reused >= len(inodes)
    assert len({folder for folder in hashed if len(folder) == 32}) == 1  # the second checkpoint alone
    assert not list(data.glob(".backup-*"))
    assert faults(backup) == {}


def on_other_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the destination seem to be on another file system than the data."""

    def link(source: Path, to: Path) -> None:
        is_staged = any(part.startswith(".backup-") for part in source.parts)
        shutil.copy2(source, to) if is_staged else link_file(source, to)

    monkeypatch.setattr("tinsmith.service.backup.create.link_file", link)
