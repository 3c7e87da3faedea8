"""The reward of programs: which code of a reply counts, the forms of tests, and partial credit."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from tests.rl.rewards.test_rewards import said
from tinsmith.rl.rewards import Rewards, make_reward
from tinsmith.rl.rewards.base import Score
from tinsmith.rl.sandbox.tests import code_of, read_tests
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.types import Message, Task
from tinsmith.testing import ScriptedSnapshot

ASSERTIONS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 1) == 1"]
RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds."


def task(**extra: object) -> Task:
    return Task(id="code/0", messages=(Message(role="user", content="Add two numbers."),), extra=extra)


def reward(**settings: object):
    return make_reward({"type": "code_tests", **settings})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nand\n```py\nb\n```\nprints\n```\nc\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```text\na\n```", "a\n"),
        ("``` Python\na = '```'\n```", "a = '```'\n"),
        ("cut off\n```python\na", "a"),
        ("a = 1", "a = 1"),
    ],
)
def test_code_is_the_last_block_of_python(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ("assert f() == [1]", [{"statements": "assert f() == [1]"}]),
        ("[f() for _ in range(3)]", [{"statements": "[f() for _ in range(3)]"}]),
        (json.dumps(ASSERTIONS[:1]), [{"statements": ASSERTIONS[0]}]),
        ([{"input": "1", "output": ["2", "3"]}], [{"input": "1", "output": "2\n3"}]),
        (
            json.dumps({"inputs": ["1", 2], "outputs": [3, "4"]}),
            [{"input": "1", "output": "3"}, {"input": "2", "output": "4"}],
        ),
    ],
)
def test_tests_are_read_in_each_form(value, tests):
    assert read_tests(value, "tests") == tests


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([], "holds no tests"),
        ("", "holds no tests"),
        ([3], r"tests\[0\] is neither"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, "fn_name are not supported"),
        ([{"input": None, "output": "1"}], r"tests\[0\].input is a NoneType"),
    ],
)
def test_other_forms_are_refused_by_name(value, error):
    with pytest.raises(ValueError, match=error):
        read_tests(value, "tests")


def test_partial_credit_is_the_share_of_passed_tests():
    wrong = "```python\ndef add(a, b):\n    return 3 if a + b == 3 else 4\n```"
    scores = [reward(partial=0.3).score(task(tests=ASSERTIONS), text) for text in (RIGHT, wrong, "")]
    assert scores == [
        Score(value=1.0, correct=True, parts={"passed": 1.0}),
        Score(value=pytest.approx(0.2), correct=False, parts={"passed": 2 / 3}),
        Score(value=0.0, correct=False, parts={"passed": 0.0}),
    ]


def test_output_setup_and_call_are_tested_in_the_pool():
    async def scores():
        pool = ScoringPool(2)
        printing = Rewards([reward()], pool=pool)
        checking = Rewards([reward(tests="test", setup="before", call="check({entry_point})", partial=0)], pool=pool)
        echo = task(tests=[{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "2\n\n"}])
        human = task(test="def check(f):\n    assert f(two, 2) == 4", before="two = 2", entry_point="add")
        program = "<think>```python\nbad\n```</think>```python\nprint(sum(map(int, input().split())), ' ')\nexit()\n```"
        policy = ScriptedSnapshot(("",), np.zeros(1), 0)
        try:
            return await asyncio.gather(
                printing.score(echo, said(program).trajectories[0], policy),
                checking.score(human, said(RIGHT).trajectories[0], policy),
            )
        finally:
            await pool.close()

    assert [(score.value, score.correct) for score in asyncio.run(scores())] == [(1.0, True), (1.0, True)]


def test_task_without_tests_is_an_error_of_its_rollout():
    with pytest.raises(ValueError, match=r"code/0 has no field 'tests' in extra; list it in `extra`"):
        reward().score(task(), RIGHT)
