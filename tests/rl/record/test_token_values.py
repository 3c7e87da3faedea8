"""Records of rollouts have the advantage and the trainer's logprob of each token that was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rl.scripted_run import run, settings


@pytest.mark.parametrize("updates", [{}, {"minibatches": 3, "epochs": 2}, {"stream": 3}], ids=str)
def test_tokens_have_advantages_and_trainer_logprobs(tmp_path: Path, updates: dict[str, int]) -> None:
    run(settings(tmp_path, steps=2, updates=updates))
    lines = [json.loads(line) for line in (tmp_path / "rollouts" / "train-000001.jsonl").read_text().splitlines()]
    by_group = {number: [line for line in lines if line["group"] == number] for number in range(3)}
    for group in by_group.values():
        for line in group:
            (turn,) = line["trajectories"][0]["turns"]
            assert "".join(turn["token_texts"]).startswith(turn["text"])
            if turn["advantages"] is None:
                assert turn["trainer_logprobs"] is None
                assert len({other["reward"] for other in group}) == 1
                continue
            mean = sum(other["reward"] for other in group) / len(group)
            assert (turn["advantages"] > 0) == (line["reward"] > mean)
            assert len(turn["trainer_logprobs"]) == len(turn["tokens"])
            if not updates:
                assert turn["trainer_logprobs"] == pytest.approx(turn["logprobs"], abs=1e-4)
    assert any(line["trajectories"][0]["turns"][0]["advantages"] for line in lines)
    evaluated = json.loads((tmp_path / "rollouts" / "eval-000000.jsonl").read_text().splitlines()[0])
    assert evaluated["trajectories"][0]["turns"][0]["advantages"] is None
