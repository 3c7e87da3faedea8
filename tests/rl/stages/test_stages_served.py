"""Every kind of demonstration data, as stages of one run on a service with the fake engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from tests.rl.algorithms.helpers import run
from tests.rl.scripted_run import rows
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.run.parts import Connect
from tinsmith.rl.stages import run_stages
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

STAGES = """
- {name: text, algorithm: {type: cpt}, demonstrations: {data: {type: jsonl, path: PATH, prompt: "{text}"}, learn: text}}
- {name: chats, algorithm: {type: sft}, demonstrations: {data: {type: jsonl, path: PATH, prompt: "{chat}"}, learn: all}}
- {name: pairs, algorithm: {type: dpo, reference: start}, keep_optimizer: true, demonstrations:
    {data: {type: jsonl, path: PATH, chosen: "{answer}", rejected: "{worse}"}}}
- {name: mixed, algorithm: {type: mix, reference: start}, demonstrations: {data: {type: jsonl, path: PATH}, ratio: 0.5}}
- {name: chord, algorithm: {type: mix_chord}, demonstrations: {data: {type: jsonl, path: PATH}, per_step: 3}}
"""


@pytest.fixture(scope="module")
def finished(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the finished run."""
    from omegaconf import OmegaConf

    folder = tmp_path_factory.mktemp("staged")
    chat = [{"role": role, "content": word} for role, word in [("user", "1?"), ("assistant", "one")] * 2]
    data = [
        {"question": f"{n}?", "answer": str(n), "worse": "no", "text": f"{n} is {n}", "chat": chat} for n in range(9)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    stages = OmegaConf.to_container(OmegaConf.create(STAGES.replace("PATH", str(folder / "data.jsonl"))))
    config = RunConfig.model_validate(
        {
            "model": {"name": "tiny", "rank": 4},
            "tasks": {"train": {"type": "addition"}, "held_out": 0},
            "rewards": [{"type": "number"}],
            "sampling": {"max_tokens": 4},
            "groups_per_step": 2,
            "group_size": 2,
            "steps": 2,
            "stages": stages,
            "monitors": [],
            "name": "staged",
            "folder": str(folder / "run"),
        }
    )
    with embedded(ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=folder / "served")) as address:

        def connecting(stage: RunConfig) -> Connect:
            async def connect(state: str, version: int) -> TinkerTrainer:
                return await TinkerTrainer.connect(stage.model, *address, seed=stage.seed, state=state, version=version)

            return connect

        run(run_stages(config, connecting, Console(quiet=True)))
    return folder / "run"


def test_every_stage_takes_its_steps(finished):
    for number, name in enumerate(("text", "chats", "pairs", "mixed", "chord"), 1):
        steps = [
            row["step"] for row in rows(finished / f"{number:02}-{name}") if "time/step" in row or "optim/lr" in row
        ]
        assert steps == [1, 2], name
    assert list(json.loads((finished / "stages.json").read_text())["ended"]) == [
        "text",
        "chats",
        "pairs",
        "mixed",
        "chord",
    ]


def test_text_and_chats_are_trained_on(finished):
    for folder in ("01-text", "02-chats"):
        first = rows(finished / folder)[0]
        assert first["optim/expert_nll"] > 0
        assert first["optim/rows"] == 2
        assert first["tokens/trained"] > 0


def test_dpo_starts_at_its_reference(finished):
    first = rows(finished / "03-pairs")[0]
    assert first["optim/rows"] == 4
    assert first["optim/pairs/margin"] == pytest.approx(0.0, abs=1e-4)
    assert first["optim/policy_loss"] == pytest.approx(math.log(2.0), abs=1e-4)


def test_mix_trains_on_rollouts_and_demonstrations(finished):
    for folder, count in (("04-mixed", 4), ("05-chord", 3)):
        row = rows(finished / folder)[0]
        assert row["optim/mix/expert"] > 0
        assert row["optim/expert_nll"] > 0
        assert row["tokens/sampled"] > 0
        assert count < row["optim/rows"] <= count + 4
