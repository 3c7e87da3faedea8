"""Rows of Countdown: solvable, scored by the reward of that name, and apart in the splits where they should be."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data import countdown
from tinsmith.rl.data.countdown import prepare_countdown, random_puzzle
from tinsmith.rl.data.row_sources import Jsonl
from tinsmith.rl.rewards.countdown import Countdown

HUB_ROWS = [{"target": 10 + number % 90, "nums": [number % 50 + 1, number // 50 + 1, 7]} for number in range(2_000)]


def countdown_splits(*arguments: object, **options: object) -> dict[str, list[dict]]:
    """The rows of each split."""
    return {name: list(rows) for name, rows in prepare_countdown(*arguments, **options).splits.items()}


def reachable(numbers: list[Fraction]) -> set[Fraction]:
    """Values of all expressions of these numbers, each used once, by brute force."""
    if len(numbers) == 1:
        return set(numbers)
    values = set()
    for i, j in combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [number for index, number in enumerate(numbers) if index not in (i, j)]
        results = {a + b, a - b, b - a, a * b} | {x / y for x, y in ((a, b), (b, a)) if y}
        for value in results:
            values |= reachable([*rest, value])
    return values


def keys(rows: list[dict]) -> set[tuple]:
    return {(row["target"], *sorted(row["nums"])) for row in rows}


def test_generated_targets_can_be_reached():
    generator, counts = Random(0), []
    for _ in range(60):
        target, numbers = random_puzzle(generator)
        counts.append(len(numbers))
        assert 10 <= target <= 100
        assert all(1 <= number <= 100 for number in numbers)
        assert target in reachable([Fraction(number) for number in numbers])
    assert set(counts) == {3, 4}


def test_generated_splits_are_seeded_and_disjoint(monkeypatch):
    monkeypatch.setattr(countdown, "TEST_ROWS", 30)
    splits = countdown_splits("generate", limit=100, seed=3)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 100, "test": 30, "stage2": 50, "stage3": 50}
    assert countdown_splits("generate", limit=100, seed=3) == splits
    assert countdown_splits("generate", limit=100, seed=4)["test"] != splits["test"]
    train, test, stage2, stage3 = (keys(splits[name]) for name in ("train", "test", "stage2", "stage3"))
    assert len(train) == 100
    assert train & test == set()
    assert stage2 & stage3 == set()
    assert stage2 | stage3 == train


@pytest.fixture
def hub(monkeypatch) -> None:
    """A dataset of 2,000 rows in place of the hub's, some of them equal to rows of test."""
    rows = [*HUB_ROWS, {"target": 10, "nums": [7, 1, 1]}, HUB_ROWS[1024], {"target": 99, "nums": [1, 2, 3]}]
    monkeypatch.setattr(countdown.Hub, "read", lambda source: rows)
    monkeypatch.setattr(countdown, "_hub_problem", lambda: "")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("source", ["hub", "auto"])
def test_hub_rows_keep_their_order(source):
    data = prepare_countdown(source)
    assert data.origin == "hub"
    train, test, stage2, stage3 = (list(data.splits[name]) for name in ("train", "test", "stage2", "stage3"))
    assert [row["nums"] for row in test] == [row["nums"] for row in HUB_ROWS[:1024]]
    # Of the last rows, the first is in test in another order, the second a repetition within train.
    expected = [*HUB_ROWS[1024:], HUB_ROWS[1024], {"target": 99, "nums": [1, 2, 3]}]
    assert [(row["target"], row["nums"]) for row in train] == [(row["target"], row["nums"]) for row in expected]
    assert len(stage2) == len(stage3) == 488
    assert keys(stage2) & keys(stage3) == set()
    assert keys(stage2) | keys(stage3) <= keys(train)


@pytest.mark.usefixtures("hub")
def test_hub_rows_can_be_limited():
    splits = countdown_splits("hub", limit=10)
    assert [len(splits[name]) for name in ("train", "test", "stage2", "stage3")] == [10, 10, 5, 5]
    assert splits["test"] == countdown_splits("hub")["test"][:10]


def test_auto_generates_without_the_hub(monkeypatch):
    monkeypatch.setattr(countdown, "_hub_problem", lambda: "the hub did not respond (ConnectError)")
    data = prepare_countdown("auto", limit=4)
    assert (data.origin, data.reason) == ("generated", "the hub did not respond (ConnectError)")
    assert prepare_countdown("generate", limit=4).reason == ""


def test_unreadable_hub_is_an_error_if_it_is_required(monkeypatch):
    def read(source: object) -> None:
        raise ConfigError("Cannot load the dataset.")

    monkeypatch.setattr(countdown.Hub, "read", read)
    with pytest.raises(ConfigError, match="Cannot load the dataset"):
        prepare_countdown("hub")
    with pytest.raises(ConfigError, match="limit is 1"):
        prepare_countdown("generate", limit=1)


def test_rows_are_tasks_of_the_reward_countdown(tmp_path):
    row = countdown.countdown_row(98, [44, 19, 35])
    assert (row["ground_truth"], row["data_source"], row["target"], row["nums"]) == (
        "98",
        "countdown",
        98,
        [44, 19, 35],
    )
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (task,) = Jsonl(path=str(file)).load()
    assert "44, 19, 35" in task.messages[0].content
    assert "98" in task.messages[0].content
    assert Countdown().score(task, "<answer>44 + 19 + 35</answer>").value == 1.0
    assert Countdown().score(task, "<answer>44 + 19 * 35</answer>").value == 0.1
    # The example of the prompt is not an answer of the policy.
    assert Countdown().score(task, "so 44 + 19 + 35").value == 0.0
