"""The two published files with every algorithm, for two steps each; only required keys are changed."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.integrations.trinity.conftest import NAME, Server
from tests.integrations.trinity.examples import Pairs
from tests.integrations.trinity.files import TINKER, VERL, with_key
from tinsmith.dialects import read_run
from tinsmith.integrations.trinity.files.name_tables import ALGORITHMS
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.run.parts import Connect
from tinsmith.rl.stages import run_stages

SHORT = (
    "steps=2", "groups_per_step=4", "group_size=8", "sampling.max_tokens=2", "sampling.max_prompt_tokens=4000",
    "monitors=[]", "rewards=[{type: format, pattern: '[^aeiou]*'}]",
)  # fmt: skip
"""Overrides that make a step fast and give the replies of an untrained model different rewards."""

OWN, OTHER = "buffer.trainer_input.experience_buffer", "buffer.trainer_input.auxiliary_buffers.sft_dataset"
TEACHER: Pairs = (("explorer.auxiliary_models", [{"model_path": NAME}]),)
ALONE: Pairs = (("mode", "train"), ("buffer.train_batch_size", 4), (f"{OWN}.storage_type", "file"))
BESIDE: Pairs = ((f"{OTHER}.storage_type", "file"), (f"{OTHER}.path", "chats.jsonl"), ("buffer.train_batch_size", 32))
NEEDS: dict[str, Pairs] = {
    "sft": (*ALONE, (f"{OWN}.path", "chats.jsonl")),
    "cpt": (*ALONE, (f"{OWN}.path", "texts.jsonl"), (f"{OWN}.format.prompt_type", "plaintext")),
    "dpo": (*ALONE, (f"{OWN}.path", "pairs.jsonl"), (f"{OWN}.format.messages_key", "prompt")),
    "mix": BESIDE,
    "mix_chord": BESIDE,
    "on_policy_distill": TEACHER,
    "jsd": TEACHER,
}
QUICK = ("grpo", "ppo", "gspo", "reinforceplusplus", "jsd", "mix", "dpo", "sft")
"""Algorithms that take different paths through the harness; `make test-all` runs the others."""

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # raised when the SDK deletes a session

CASES = [
    pytest.param(
        file, name, marks=() if file == TINKER and name in QUICK else pytest.mark.slow, id=f"{file.stem}-{name}"
    )
    for file in (TINKER, VERL)
    for name in ALGORITHMS
]


def changed(file: Path, name: str) -> str:
    """The text of the file with another algorithm."""
    text = file.read_text()
    assert text.count("algorithm_type: grpo\n") == 1
    text = text.replace("algorithm_type: grpo\n", f"algorithm_type: {name}\n")
    values = yaml.safe_load(text)
    for key, value in NEEDS.get(name, ()):
        values = with_key(values, key, value)
    return yaml.safe_dump(values, sort_keys=False) if name in NEEDS else text


def connecting(server: Server):
    def for_stage(config: RunConfig) -> Connect:
        async def connect(state: str, version: int) -> Trainer:
            url, key = server
            return await TinkerTrainer.connect(config.model, url, key, seed=config.seed, state=state, version=version)

        return connect

    return for_stage


@pytest.mark.parametrize(("file", "name"), CASES)
def test_published_file_trains_two_steps(
    file: Path, name: str, place: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(place)
    for offline in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(offline, "1")
    (place / "run.yaml").write_text(changed(file, name))
    run_file = read_run(place / "run.yaml", SHORT)
    output = io.StringIO()
    _, state = asyncio.run(run_stages(run_file.settings, connecting(server), Console(file=output, width=200)))
    assert (state.step, state.version) == (2, 2), output.getvalue()
    assert run_file.settings.algorithm.type == ("grpo_std" if name == "grpo" else name)
    folder = Path(run_file.settings.folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert not any("optim/skipped" in row for row in rows)
