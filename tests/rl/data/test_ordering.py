"""Training tasks come in the configured order, from one source or several."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data.ordering import Difficulty, DifficultyOrder
from tinsmith.rl.data.sources import Addition, Jsonl, Largest
from tinsmith.rl.data.tasks import TaskSampler, TasksConfig, split
from tinsmith.rl.types import Group, Rollout, Task


def task_sampler(order: dict, path=None, seed: int = 0, **more) -> TaskSampler:
    """Training tasks in the order `order`, from a file or from seven generated tasks."""
    train = Largest(size=7) if path is None else Jsonl(path=str(path))
    return split(TasksConfig.model_validate({"train": train, "held_out": 0, "order": order, **more}), seed)[0]


def numbers(tasks: list[Task]) -> list[int]:
    """Row number of each task."""
    return [int(task.id.rpartition("/")[2]) for task in tasks]


@pytest.fixture
def rated(tmp_path):
    """JSON Lines file of rows with the pass rates of a weak and a strong model."""
    rows = [
        {"question": f"q{index}", "answer": "a", "weak": weak, "strong": strong, "length": index % 2}
        for index, (weak, strong) in enumerate([(0.5, 0.9), (0.0, 0.2), (0.9, 1.0), (0.2, 0.6)])
    ]
    file = tmp_path / "rated.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_sequential_order_is_the_order_of_rows():
    assert numbers(task_sampler({"type": "sequential"}).draw(10)) == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_random_batch_has_distinct_tasks_and_depends_on_seed():
    first, second = task_sampler({"type": "random"}), task_sampler({"type": "random"})
    batches = [numbers(first.draw(5)) for _ in range(20)]
    assert all(len(set(batch)) == 5 for batch in batches)
    assert batches == [numbers(second.draw(5)) for _ in range(20)]
    counts = Counter(number for batch in batches for number in batch)
    assert len(counts) == 7
    assert max(counts.values()) > 14  # an epoch at a time would give each of them 14 or 15


def test_random_batch_may_exceed_the_source():
    assert sorted(set(numbers(task_sampler({"type": "random"}).draw(20)))) == list(range(7))


def test_easy_to_hard_sorts_by_fields_in_each_epoch(rated):
    assert numbers(task_sampler({"type": "easy_to_hard", "by": ["weak"], "descending": True}, rated).draw(6)) == [
        2, 0, 3, 1, 2, 0,
    ]  # fmt: skip
    assert numbers(task_sampler({"type": "easy_to_hard", "by": ["length", "strong"]}, rated).draw(4)) == [0, 2, 1, 3]
    with pytest.raises(ConfigError, match="not every row has a number in 'width'"):
        task_sampler({"type": "easy_to_hard", "by": ["width"]}, rated)
    with pytest.raises(ConfigError, match="have no field 'width'"):
        task_sampler({"type": "easy_to_hard", "by": ["width"]})


def scored_group(task: Task, *rewards: float) -> Group:
    """A group of `task` with a rollout for each reward."""
    return Group(task=task, rollouts=tuple(Rollout.single((), reward) for reward in rewards))


def test_difficulty_updates_equal_the_formula():
    rows = np.array([3, 5, 8])
    pass_rates = np.array([[0.2, 0.4, 0.0], [0.6, 0.8, 0.5]])
    order = DifficultyOrder(Difficulty(by=("weak", "strong")), rows, pass_rates, (0,))
    mean = pass_rates.mean(axis=0)
    assert order.alpha == pytest.approx(1 + 0.2 * 16 * mean)
    assert order.beta == pytest.approx(1 + 0.2 * 16 * (1 - mean))
    before = order.alpha.copy(), order.beta.copy()
    order.update([3, 8], [0.5, 0.25])
    share = ((0.5 - 0.2) + (0.25 - 0.0)) / 2 / (((0.6 - 0.2) + (0.5 - 0.0)) / 2)
    guess = 0.4 + share * (0.8 - 0.4)
    assert order.alpha == pytest.approx(
        [0.8 * before[0][0] + 16 * 0.5, 0.8 * before[0][1] + 3.2 * guess, 0.8 * before[0][2] + 16 * 0.25]
    )
    assert order.beta == pytest.approx(
        [0.8 * before[1][0] + 16 * 0.5, 0.8 * before[1][1] + 3.2 * (1 - guess), 0.8 * before[1][2] + 16 * 0.75]
    )


def test_difficulty_selects_tasks_nearest_the_target_reward(rated):
    order = {"type": "difficulty", "tau": 0.0, "target_reward": 0.5}
    sampler = task_sampler(order, rated)
    first = sampler.draw(4)
    assert sorted(numbers(first)) == [0, 1, 2, 3]
    rates = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1.0, 0.0), 3: (1.0, 1.0)}
    sampler.update([scored_group(task, *rates[number]) for task, number in zip(first, numbers(first), strict=True)])
    assert numbers(sampler.draw(1)) == [2]


@pytest.mark.parametrize("order", ["random", "shuffle", {"type": "difficulty", "sample": True}])
def test_order_resumes_from_its_saved_state(rated, order):
    order = order if isinstance(order, dict) else {"type": order}

    def play(sampler: TaskSampler, batches: int) -> list[list[str]]:
        drawn = []
        for _ in range(batches):
            tasks = sampler.draw(2)
            sampler.update([scored_group(task, (index + 1) / 3) for index, task in enumerate(tasks)])
            drawn.append([task.id for task in tasks])
        return drawn

    whole = task_sampler(order, rated)
    expected = play(whole, 9)
    first = task_sampler(order, rated)
    assert play(first, 4) == expected[:4]
    saved = json.loads(json.dumps({"cursor": first.cursor, "order": first.state}))
    again = task_sampler(order, rated)
    again.restore(saved["cursor"], saved["order"])
    assert play(again, 5) == expected[4:]


def test_restored_order_accepts_updates_of_pending_tasks(rated):
    first = task_sampler({"type": "difficulty"}, rated)
    tasks = first.draw(2)
    again = task_sampler({"type": "difficulty"}, rated)
    again.restore(first.cursor, json.loads(json.dumps(first.state)))
    for sampler in (first, again):
        sampler.update([scored_group(task, 1.0) for task in tasks])
    assert first.state == again.state


def several(seed: int = 0) -> TaskSampler:
    """Tasks of three sources; two of them have the same type."""
    train = (Largest(size=6), Addition(low=10, high=12), Largest(size=3, seed=9, prompt="Max of {a} {b} {c} {d}?"))
    return split(TasksConfig(train=train, held_out=0), seed)[0]


def test_epoch_mixes_sources_by_their_size():
    sampler = several()
    assert sampler.size == 6 + 9 + 3
    for _ in range(3):
        epoch = sampler.draw(18)
        assert len({task.messages for task in epoch}) == len({task.id for task in epoch}) == 18
    first, second = sampler.draw(18), sampler.draw(18)
    assert [task.id for task in first] != [task.id for task in second]
    assert numbers(several(1).draw(18)) != numbers(several(0).draw(18))


def test_each_source_keeps_its_order():
    config = TasksConfig.model_validate(
        {
            "train": [{"type": "largest", "size": 5}, {"type": "addition", "high": 11}],
            "held_out": 0,
            "order": {"type": "sequential"},
        }
    )
    drawn = split(config, 0)[0].draw(18)
    assert numbers([task for task in drawn if task.id.startswith("largest")]) == [0, 1, 2, 3, 4] * 2
    assert numbers([task for task in drawn if task.id.startswith("addition")]) == [0, 1, 2, 3] * 2


def test_held_out_tasks_come_from_all_sources():
    config = TasksConfig.model_validate(
        {"train": [{"type": "largest", "size": 10}, {"type": "addition", "high": 13}], "held_out": 9}
    )
    sampler, held_out = split(config, 0)
    assert {task.id.partition("/")[0] for task in held_out[""]} == {"largest", "addition"}
    assert {task.id for task in sampler.draw(40)}.isdisjoint(task.id for task in held_out[""])


def test_difficulty_samples_by_softmax_of_target_distance(rated):
    sampler = task_sampler({"type": "difficulty", "by": ["weak", "strong"], "tau": 0.05, "target_reward": 1.0}, rated)
    counts = Counter(number for _ in range(300) for number in numbers(sampler.draw(1)))
    expected = [
        (1 + 3.2 * (weak + strong) / 2) / (2 + 3.2) for weak, strong in [(0.5, 0.9), (0, 0.2), (0.9, 1), (0.2, 0.6)]
    ]
    weights = np.exp(-(1 - np.array(expected)) / 0.05)
    for number, share in enumerate(weights / weights.sum()):
        assert counts[number] / 300 == pytest.approx(share, abs=0.07)
