"""Mixtures: each environment has its own rows, sampling and rewards; shares are exact; runs resume."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.rl.scripted_run import Killed, breaking, rows, run, scripted, settings
from tinsmith.rl.environments.mixture import EnvironmentOrder, split_environments
from tinsmith.rl.environments.tasks import TasksEnvironment
from tinsmith.rl.run.state import read_state

PLUGINS = Path(__file__).parent / "plugins"


def checking(label: str, weight: float = 1.0, **changes):
    """An environment that checks its rows and sampling, rewarded for the reply `label`."""
    own = {"name": f"say-{label}", "label": label, "weight": weight}
    sampling = {"max_tokens": 4 + len(label), **({"temperature": 1 - len(label) / 100} if weight else {})}
    return {"type": "checking", **own, "sampling": sampling, **changes}


def mixture(folder, environments, **changes):
    """Settings of a run of these environments."""
    values = {"tasks": {}, "rewards": [], "environments": environments, "plugins": str(PLUGINS), **changes}
    return settings(folder / "run", **values)


def test_each_environment_gets_its_own_rows_and_sampling(tmp_path):
    config = mixture(tmp_path, [checking("yes", weight=2), checking("no")], steps=4, eval={"every": 2})
    run(config)
    trained = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    for row in trained:
        assert row["rollouts/failed"] == 0
        assert row["env/say-yes/groups/sampled"] == 2
        assert row["env/say-no/groups/sampled"] == 1
        assert row["env/say-yes/workflow/rows"] == 30
        assert {"env/say-no/reward/mean", "env/say-no/tokens/reply", "env/say-no/groups/constant"} <= row.keys()
        assert "workflow/rows" not in row
        mean = (2 * row["env/say-yes/reward/mean"] + row["env/say-no/reward/mean"]) / 3
        assert row["reward/mean"] == pytest.approx(mean)
    evaluated = [row for row in rows(tmp_path / "run") if "eval/say-yes/reward/mean" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    assert all(row["eval/say-yes/failed"] == row["eval/say-no/failed"] == 0 for row in evaluated)
    assert all(row["eval/say-yes/workflow/rows"] == 30 and row["eval/tasks"] == 10 for row in evaluated)


def test_groups_share_a_row_and_rows_come_once_per_epoch(tmp_path):
    config = mixture(tmp_path, [checking("yes", rows=14, held_out=2), checking("no", rows=9, held_out=3)], steps=12)
    run(config.model_copy(update={"groups_per_step": 2}))
    seen = {"say-yes": [], "say-no": []}
    for file in sorted((tmp_path / "run" / "rollouts").glob("train-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        groups = [lines[begin : begin + 4] for begin in range(0, len(lines), 4)]
        for group in groups:
            assert len({(line["task"], line["answer"]) for line in group}) == 1
            environment, _, task = group[0]["task"].partition("/")
            seen[environment].append(task)
    assert len(seen["say-yes"]) == len(set(seen["say-yes"])) == 12  # 14 rows, 2 of them held out
    assert len(set(seen["say-no"][:6])) == len(set(seen["say-no"][6:])) == 6


@pytest.mark.parametrize("staleness", [0, 1])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, staleness):
    environments = [checking("yes", weight=0.7), checking("no", weight=0.3), checking("perhaps", weight=0)]
    whole = mixture(tmp_path / "whole", environments, staleness=staleness)
    killed = mixture(tmp_path / "killed", environments, staleness=staleness)
    run(whole)
    with pytest.raises(Killed):
        run(killed, breaking(tmp_path / "killed" / "run", calls=5, at="train"))
    assert read_state(tmp_path / "killed" / "run").step == 3
    run(killed, scripted(tmp_path / "killed" / "run"))
    assert rows(tmp_path / "killed" / "run") == rows(tmp_path / "whole" / "run")
    assert read_state(tmp_path / "killed" / "run").order == read_state(tmp_path / "whole" / "run").order


def test_weight_0_is_evaluated_every_time_and_never_trained(tmp_path):
    config = mixture(tmp_path, [checking("yes"), checking("no", weight=0)], steps=6, eval={"every": 2})
    run(config)
    evaluated = [row["step"] for row in rows(tmp_path / "run") if row.get("eval/say-no/tasks") == 5]
    assert evaluated == [0, 2, 4, 6]
    assert not [name for row in rows(tmp_path / "run") for name in row if name.startswith("env/say-no")]
    assert read_state(tmp_path / "run").order["environments"].keys() == {"say-yes"}


@pytest.mark.parametrize("seed", [0, 7])
def test_shares_of_each_step_and_of_the_run_are_exact(seed):
    weights, groups, steps = {"a": 0.3, "b": 0.2, "c": 0.23, "d": 0.27}, 16, 200
    order = EnvironmentOrder(weights, seed, groups)
    total = Counter()
    for step in range(steps):
        counts = Counter(order.names(step * groups, (step + 1) * groups))
        assert all(math.floor(w * groups) <= counts[name] <= math.ceil(w * groups) for name, w in weights.items())
        total += counts
        assert all(abs(total[name] - w * groups * (step + 1)) < 3 for name, w in weights.items())


def test_order_depends_only_on_seed_and_number_of_the_draw():
    order = EnvironmentOrder({"a": 1, "b": 2}, 3, 4)
    names = order.names(0, 50)
    again = EnvironmentOrder({"a": 10, "b": 20}, 3, 4)
    assert [again.names(number, number + 1)[0] for number in reversed(range(50))] == names[::-1]
    assert names != EnvironmentOrder({"a": 1, "b": 2}, 4, 4).names(0, 50)


def sources(**weights):
    """Environments of the sums of numbers from 0; half of the rows of each are held out."""
    return [
        TasksEnvironment.model_validate(
            {"name": name, "weight": weight, "train": {"type": "addition", "low": 0, "high": 4}, "held_out": 4}
        )
        for name, weight in weights.items()
    ]


def restored(cursor, state):
    """The next draws of a sampler restored at `cursor`."""
    sampler, _ = split_environments(sources(a=0.6, b=0.4), 1, 5, train=True)
    sampler.restore(cursor, state)
    return [(task.environment, task.id) for task in sampler.draw(20)]


def test_restored_sampler_repeats_later_draws():
    sampler, _ = split_environments(sources(a=0.6, b=0.4), 1, 5, train=True)
    drawn = [[(task.environment, task.id) for task in sampler.draw(5)] for _ in range(12)]
    state = json.loads(json.dumps(sampler.state))
    for batch in range(8):
        expected = [task for tasks in drawn[batch : batch + 4] for task in tasks]
        assert restored(5 * batch, state) == expected
        assert restored(5 * batch, {}) == expected
    assert sampler.cursor == 60
