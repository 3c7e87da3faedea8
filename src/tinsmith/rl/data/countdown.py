"""Tasks of the number game Countdown as rows: from the hub, or generated in the same form.

The splits are train, test, stage2 and stage3. No task of test is in another split; two tasks are the same if their
targets are equal and their numbers are equal in any order. stage2 and stage3 are disjoint parts of train, for runs of
several stages. The same arguments give the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from tinsmith.errors import ConfigError
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.data.row_sources import Hub

DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"
"""The dataset of the hub: rows of a target and 3 or 4 numbers."""
TEST_ROWS = 1024
STAGE_ROWS = 50_000
GENERATED_ROWS = 100_000
"""Rows of train if the tasks are generated."""
TARGETS = range(10, 101)

PROMPT = """\
Using the numbers {numbers}, reach the target number {target}. You may use the operations addition (+), subtraction \
(-), multiplication (*) and division (/), and parentheses. Use each number exactly once. Show your steps, and give \
the final answer inside <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."""

CountdownSource = Literal["hub", "generate", "auto"]
Row = dict[str, Any]
Puzzle = tuple[int, tuple[int, ...]]
"""Target and numbers."""


@dataclass(frozen=True, slots=True)
class CountdownData:
    """The splits, and where their tasks come from.

    Example: CountdownData(origin="generated", splits={"train": rows, "test": rows, "stage2": rows, "stage3": rows})
    """

    origin: Literal["hub", "generated"]
    splits: dict[str, Sequence[Row]]
    """Rows of each split, created on access."""
    reason: str = ""
    """Why the hub was not used although it was tried; empty otherwise."""


def prepare_countdown(source: CountdownSource = "auto", limit: int | None = None, seed: int = 0) -> CountdownData:
    """Make the splits, each of at most `limit` rows. Raises ConfigError if `source` is hub and it cannot be read.

    `auto` generates the tasks if the hub cannot be reached. The first 1,024 rows of the dataset are test, the others
    train. `seed` draws stage2 and stage3, and the generated tasks.
    """
    if limit is not None and limit < 2:
        raise ConfigError(f"limit is {limit}.", "Use at least 2 rows, because stage2 and stage3 are parts of train.")
    reason = ""
    if source == "auto":
        reason = _hub_problem()
    if source == "hub" or (source == "auto" and not reason):
        return CountdownData("hub", _splits(_from_hub(), limit, seed))
    return CountdownData("generated", _splits(_generated(seed), limit or GENERATED_ROWS, seed), reason)


def countdown_row(target: int, numbers: Iterable[int]) -> Row:
    """The row of a task; `answer` is what the reward `countdown` reads."""
    nums = list(numbers)
    return {
        "question": PROMPT.format(numbers=", ".join(map(str, nums)), target=target),
        "answer": json.dumps({"target": target, "numbers": nums}),
        "ground_truth": str(target),
        "data_source": "countdown",
        "target": target,
        "nums": nums,
    }


def random_puzzle(generator: Random) -> Puzzle:
    """A target from 10 to 100, and 3 or 4 numbers from 1 to 100 that reach it by whole intermediate values."""
    draw = generator.random
    count = 3 + int(2 * draw())
    while True:
        numbers = tuple(1 + int(100 * draw()) for _ in range(count))
        value = _combine(numbers, draw)
        if value in TARGETS:
            return value, numbers


def _combine(numbers: Sequence[int], draw: Callable[[], float]) -> int:
    """Combine all numbers by random operations in a random order; 0 if a division leaves a remainder.

    `draw` returns random numbers in [0, 1).
    """
    values = list(numbers)
    while len(values) > 1:
        a, b = values.pop(int(len(values) * draw())), values.pop(int(len(values) * draw()))
        operation = int(4 * draw())
        if operation == 3 and (b == 0 or a % b):
            return 0
        values.append((a + b, a - b, a * b)[operation] if operation < 3 else a // b)
    return values[0]


def _generated(seed: int) -> Iterator[Puzzle]:
    """Different puzzles, without end."""
    generator, seen = Random(f"countdown/{seed}"), set[Puzzle]()
    while True:
        puzzle = random_puzzle(generator)
        if (key := _key(puzzle)) not in seen:
            seen.add(key)
            yield puzzle


def _from_hub() -> Iterator[Puzzle]:
    """The puzzles of the dataset in order."""
    rows = Hub(name=DATASET, split="train").read()
    return ((int(row["target"]), tuple(map(int, row["nums"]))) for row in rows)


def _hub_problem() -> str:
    """Why the dataset cannot be read from the hub; empty if it can. One request, because loading retries for 30 s."""
    try:
        import datasets  # noqa: F401
        from huggingface_hub import HfApi
    except ImportError:
        return "the package datasets is not installed (pip install 'tinsmith[hub]')"
    try:
        HfApi().dataset_info(DATASET, timeout=10)
    except Exception as error:  # noqa: BLE001  network errors of several packages: the tasks are generated instead
        return f"the hub did not respond ({type(error).__name__})"
    return ""


def _splits(puzzles: Iterator[Puzzle], limit: int | None, seed: int) -> dict[str, Sequence[Row]]:
    test: list[Puzzle] = []
    train: list[Puzzle] = []
    test_keys = set[Puzzle]()
    for puzzle in puzzles:
        if len(test) < TEST_ROWS:
            test.append(puzzle)
            test_keys.add(_key(puzzle))
        elif _key(puzzle) not in test_keys:
            train.append(puzzle)
        if limit is not None and len(train) >= limit:
            break
    stages = _unique(train)
    Random(f"countdown/{seed}/stages").shuffle(stages)
    size = min(STAGE_ROWS, len(stages) // 2)
    splits = {"train": train, "test": test[:limit], "stage2": stages[:size], "stage3": stages[size : 2 * size]}
    return {name: _rows(chosen) for name, chosen in splits.items()}


def _unique(puzzles: Sequence[Puzzle]) -> list[Puzzle]:
    """The first of each group of same puzzles."""
    return list({_key(puzzle): puzzle for puzzle in reversed(puzzles)}.values())[::-1]


def _key(puzzle: Puzzle) -> Puzzle:
    """Equal for the same puzzles."""
    target, numbers = puzzle
    return target, tuple(sorted(numbers))


def _rows(puzzles: Sequence[Puzzle]) -> Sequence[Row]:
    return LazySequence(len(puzzles), lambda index: countdown_row(*puzzles[index]))
