"""pass@k is unbiased, and evaluation runs at the configured steps."""

from __future__ import annotations

from itertools import combinations

import pytest
from pydantic import ValidationError

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.evaluate import EvalConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.record.metrics import pass_at
from tinsmith.rl.types import Group, Rollout, Task


def group(*rewards: float) -> Group:
    """A group with a rollout for each reward."""
    rollouts = tuple(Rollout.single((), reward) for reward in rewards)
    return Group(task=Task(id="t", messages=()), rollouts=rollouts)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    rewards = (1.0, 0.0, 0.4, 1.0, 0.0)
    values = pass_at([group(*rewards)], threshold=1.0)
    assert list(values) == ["eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/pass@5"]
    for k in (1, 2, 4, 5):
        subsets = [any(reward >= 1.0 for reward in subset) for subset in combinations(rewards, k)]
        assert values[f"eval/pass@{k}"] == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_counts_failed_rollouts_as_wrong():
    failed = Group(task=Task(id="t", messages=()), rollouts=(Rollout.single((), 1.0, error="x"),))
    assert pass_at([group(1.0), group(0.5), failed, failed], threshold=0.5) == {"eval/pass@1": 0.5}


def test_evaluation_is_due_before_during_and_after():
    def due(config: EvalConfig) -> list[int]:
        return [step for step in range(11) if config.due(step, 10)]

    assert due(EvalConfig(every=4)) == [0, 4, 8, 10]
    assert due(EvalConfig(every=5, before=False, after=False)) == [5, 10]
    assert due(EvalConfig(every=4, after=False)) == [0, 4, 8]
    assert due(EvalConfig(every=0)) == [0, 10]


def test_several_greedy_samples_are_an_error():
    with pytest.raises(ValidationError, match="greedy answers are identical"):
        EvalConfig(num_samples=4)


def test_evaluation_overrides_temperature_and_max_tokens():
    training = SamplingConfig(max_tokens=8, stop=("\n",), temperature=1.0)
    assert EvalConfig().sampling(training) == SamplingConfig(max_tokens=8, stop=("\n",), temperature=0.0)
    assert EvalConfig(max_tokens=3, temperature=0.7).sampling(training).max_tokens == 3


def test_evaluation_has_its_own_samples_limit_and_rewards(tmp_path):
    change = {"num_samples": 4, "temperature": 1.0, "limit": 3, "rewards": [{"type": "format", "pattern": "no|yes"}]}
    run(settings(tmp_path, steps=1, eval=change))
    first = rows(tmp_path)[0]
    assert {"eval/pass@1", "eval/pass@2", "eval/pass@4"} <= first.keys()
    assert first["eval/tasks"] == 3
    assert first["eval/pass@4"] > 0.5


def test_each_eval_source_has_its_own_settings(tmp_path):
    sources = {
        "hard": {"num_samples": 4, "temperature": 1.0, "top_k": 1, "rewards": [{"type": "format", "pattern": "no"}]},
        "plain": {"workflow": {"type": "single_turn", "system": "Say yes."}},
    }
    held = {name: {"type": "addition", "low": 10 * at, "high": 10 * at + 1} for at, name in enumerate(sources, 1)}
    tasks = {"train": {"type": "addition", "low": 50}, "eval": held}
    run(settings(tmp_path, steps=1, tasks=tasks, eval={"sources": sources, "temperature": 0.0}))
    first = rows(tmp_path)[0]
    assert {"eval/hard/pass@4", "eval/plain/pass@1"} <= first.keys()
    assert {"eval/plain/pass@2", "eval/pass@2"}.isdisjoint(first)
    assert first["eval/tasks"] == 8
    lines = (tmp_path / "rollouts" / "eval-000000.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 4 + 4


def test_settings_of_an_unknown_eval_source_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="no source with this name"):
        settings(tmp_path, eval={"sources": {"some": {"num_samples": 1}}})
    with pytest.raises(ValidationError, match="greedy answers are identical"):
        EvalConfig.model_validate({"sources": {"some": {"num_samples": 2}}})


def test_first_evaluation_reports_the_best_constant_answer(tmp_path):
    change = {"baseline": 100, "rewards": [{"type": "closeness"}]}
    run(settings(tmp_path, steps=1, tasks={"train": {"type": "largest", "size": 500}, "held_out": 50}, eval=change))
    first, *rest = [row for row in rows(tmp_path) if "eval/pass@1" in row]
    assert 0 < first["eval/constant_pass@1"] < 0.3
    assert 0.3 < first["eval/constant_reward"] < 0.6
    assert all("eval/constant_pass@1" not in row for row in rest)


def test_run_without_held_out_tasks_is_not_evaluated(tmp_path):
    run(settings(tmp_path, steps=1, tasks={"train": {"type": "addition"}, "held_out": 0}, eval={}))
    assert not any("eval/pass@1" in row for row in rows(tmp_path))
