"""Training tasks come in the order that was asked for, over one source or several."""

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


def deck(order: dict, path=None, seed: int = 0, **more) -> TaskSampler:
    train = Largest(size=7) if path is None else Jsonl(path=str(path))
    return split(TasksConfig.model_validate({"train": train, "held_out": 0, "order": order, **more}), seed)[0]


def numbers(tasks: list[Task]) -> list[int]:
    return [int(task.id.rpartition("/")[2]) for task in tasks]


@pytest.fixture
def rated(tmp_path):
    """Rows with how well a weak and a strong model do."""
    rows = [
        {"question": f"q{index}", "answer": "a", "weak": weak, "strong": strong, "length": index % 2}
        for index, (weak, strong) in enumerate([(0.5, 0.9), (0.0, 0.2), (0.9, 1.0), (0.2, 0.6)])
    ]
    file = tmp_path / "rated.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_sequential_is_as_the_rows_stand():
    assert numbers(deck({"type": "sequential"}).draw(10)) == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_random_has_none_twice_in_a_batch_and_is_the_seeds_alone():
    one, two = deck({"type": "random"}), deck({"type": "random"})
    batches = [numbers(one.draw(5)) for _ in range(20)]
    assert all(len(set(batch)) == 5 for batch in batches)
    assert batches == [numbers(two.draw(5)) for _ in range(20)]
    counts = Counter(number for batch in batches for number in batch)
    assert len(counts) == 7
    assert max(counts.values()) > 14  # an epoch at a time would give each of them 14 or 15


def test_random_goes_round_where_a_batch_is_larger_than_the_source():
    assert sorted(set(numbers(deck({"type": "random"}).draw(20)))) == list(range(7))


def test_easy_to_hard_sorts_by_fields_and_begins_again(rated):
    assert numbers(deck({"type": "easy_to_hard", "by": ["weak"], "descending": True}, rated).draw(6)) == [
        2, 0, 3, 1, 2, 0,
    ]  # fmt: skip
    assert numbers(deck({"type": "easy_to_hard", "by": ["length", "strong"]}, rated).draw(4)) == [0, 2, 1, 3]
    with pytest.raises(ConfigError, match="not every row has a number in 'width'"):
        deck({"type": "easy_to_hard", "by": ["width"]}, rated)
    with pytest.raises(ConfigError, match="have no field 'width'"):
        deck({"type": "easy_to_hard", "by": ["width"]})


def scored_group(task: Task, *rewards: float) -> Group:
    return Group(task=task, rollouts=tuple(Rollout(rewards={"policy": reward}) for reward in rewards))


def test_difficulty_follows_the_beliefs_formula():
    rows = np.array([3, 5, 8])
    known = np.array([[0.2, 0.4, 0.0], [0.6, 0.8, 0.5]])
    lane = DifficultyOrder(Difficulty(by=("weak", "strong")), rows, known, (0,))
    mean = known.mean(axis=0)
    assert lane.alpha == pytest.approx(1 + 0.2 * 16 * mean)
    assert lane.beta == pytest.approx(1 + 0.2 * 16 * (1 - mean))
    before = lane.alpha.copy(), lane.beta.copy()
    lane.update([3, 8], [0.5, 0.25])
    share = ((0.5 - 0.2) + (0.25 - 0.0)) / 2 / (((0.6 - 0.2) + (0.5 - 0.0)) / 2)
    guess = 0.4 + share * (0.8 - 0.4)
    assert lane.alpha == pytest.approx(
        [0.8 * before[0][0] + 16 * 0.5, 0.8 * before[0][1] + 3.2 * guess, 0.8 * before[0][2] + 16 * 0.25]
    )
    assert lane.beta == pytest.approx(
        [0.8 * before[1][0] + 16 * 0.5, 0.8 * before[1][1] + 3.2 * (1 - guess), 0.8 * before[1][2] + 16 * 0.75]
    )


def test_difficulty_takes_what_is_nearest_the_target(rated):
    order = {"type": "difficulty", "tau": 0.0, "target_reward": 0.5}
    cards = deck(order, rated)
    first = cards.draw(4)
    assert sorted(numbers(first)) == [0, 1, 2, 3]
    rates = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1.0, 0.0), 3: (1.0, 1.0)}
    cards.update([scored_group(task, *rates[number]) for task, number in zip(first, numbers(first), strict=True)])
    assert numbers(cards.draw(1)) == [2]


@pytest.mark.parametrize("order", ["random", "shuffle", {"type": "difficulty", "sample": True}])
def test_an_order_goes_on_where_it_was(rated, order):
    order = order if isinstance(order, dict) else {"type": order}

    def play(cards: TaskSampler, batches: int) -> list[list[str]]:
        drawn = []
        for _ in range(batches):
            tasks = cards.draw(2)
            cards.update([scored_group(task, (index + 1) / 3) for index, task in enumerate(tasks)])
            drawn.append([task.id for task in tasks])
        return drawn

    whole = deck(order, rated)
    expected = play(whole, 9)
    first = deck(order, rated)
    assert play(first, 4) == expected[:4]
    kept = json.loads(json.dumps({"cursor": first.cursor, "order": first.state}))
    again = deck(order, rated)
    again.restore(kept["cursor"], kept["order"])
    assert play(again, 5) == expected[4:]


def test_what_is_under_way_is_told_after_a_restart(rated):
    first = deck({"type": "difficulty"}, rated)
    tasks = first.draw(2)
    again = deck({"type": "difficulty"}, rated)
    again.restore(first.cursor, json.loads(json.dumps(first.state)))
    for cards in (first, again):
        cards.update([scored_group(task, 1.0) for task in tasks])
    assert first.state == again.state


def several(seed: int = 0) -> TaskSampler:
    train = (Largest(size=6), Addition(low=10, high=12), Largest(size=3, seed=9, prompt="Max of {a} {b} {c} {d}?"))
    return split(TasksConfig(train=train, held_out=0), seed)[0]


def test_several_sources_come_in_proportion_in_each_epoch():
    cards = several()
    assert cards.size == 6 + 9 + 3
    for _ in range(3):
        epoch = cards.draw(18)
        assert len({task.messages for task in epoch}) == len({task.id for task in epoch}) == 18
    first, second = cards.draw(18), cards.draw(18)
    assert [task.id for task in first] != [task.id for task in second]
    assert numbers(several(1).draw(18)) != numbers(several(0).draw(18))


def test_several_sources_each_keep_their_own_order():
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


def test_held_out_tasks_are_split_off_all_sources():
    config = TasksConfig.model_validate(
        {"train": [{"type": "largest", "size": 10}, {"type": "addition", "high": 13}], "held_out": 9}
    )
    cards, held_out = split(config, 0)
    assert {task.id.partition("/")[0] for task in held_out[""]} == {"largest", "addition"}
    assert {task.id for task in cards.draw(40)}.isdisjoint(task.id for task in held_out[""])


def test_difficulty_draws_the_likely_ones_most(rated):
    cards = deck({"type": "difficulty", "by": ["weak", "strong"], "tau": 0.05, "target_reward": 1.0}, rated)
    counts = Counter(number for _ in range(300) for number in numbers(cards.draw(1)))
    expected = [
        (1 + 3.2 * (weak + strong) / 2) / (2 + 3.2) for weak, strong in [(0.5, 0.9), (0, 0.2), (0.9, 1), (0.2, 0.6)]
    ]
    weights = np.exp(-(1 - np.array(expected)) / 0.05)
    for number, share in enumerate(weights / weights.sum()):
        assert counts[number] / 300 == pytest.approx(share, abs=0.07)
