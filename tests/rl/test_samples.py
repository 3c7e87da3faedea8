"""Rows say exactly what was sampled and what it is worth, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.rl.samples import samples, spoken
from tinsmith.rl.types import Group, Rollout, Task, Turn

TASK = Task(id="t/0", messages=())


def turn(prompt, tokens, role="policy") -> Turn:
    logprobs = tuple(-0.1 * token for token in tokens)
    return Turn(prompt=tuple(prompt), tokens=tuple(tokens), logprobs=logprobs, text="", stop="stop", role=role)


def rows_of(*rollouts: Rollout, values: list[float], merge: bool = False):
    advantages = [np.full(spoken(one), value, np.float32) for one, value in zip(rollouts, values, strict=True)]
    return samples([Group(task=TASK, rollouts=rollouts)], [advantages], merge=merge)


def test_a_reply_is_shifted_by_one_and_its_prompt_weighs_nothing():
    (row,) = rows_of(Rollout(turns=(turn([5, 6], [7, 2]),)), values=[0.5])
    assert row.tokens.tolist() == [5, 6, 7]
    assert row.targets.tolist() == [6, 7, 2]
    assert row.advantages.tolist() == [0.0, 0.5, 0.5]
    assert row.logprobs == pytest.approx([0.0, -0.7, -0.2])
    assert row.mask.tolist() == [False, True, True]


def test_turns_that_extend_each_other_are_one_row():
    rollout = Rollout(turns=(turn([5], [7, 8]), turn([5, 7, 8, 9, 9], [3])))
    (row,) = samples([Group(task=TASK, rollouts=(rollout,))], [[np.array([1, 2, 3], np.float32)]], merge=False)
    assert row.tokens.tolist() == [5, 7, 8, 9, 9]
    assert row.targets.tolist() == [7, 8, 9, 9, 3]
    assert row.advantages.tolist() == [1, 2, 0, 0, 3]
    assert row.mask.tolist() == [True, True, False, False, True]


def test_a_turn_with_another_past_begins_a_row():
    first, second = rows_of(Rollout(turns=(turn([5], [7]), turn([5, 8], [3]))), values=[1.0])
    assert (first.targets.tolist(), second.targets.tolist()) == ([7], [8, 3])
    assert second.advantages.tolist() == [0, 1]


def test_another_roles_words_are_context_not_training():
    rollout = Rollout(turns=(turn([5], [7]), turn([5, 7], [8], role="judge"), turn([5, 7, 8], [9])))
    (row,) = rows_of(rollout, values=[1.0])
    assert row.targets.tolist() == [7, 8, 9]
    assert row.mask.tolist() == [True, False, True]


def test_dropped_groups_and_failed_rollouts_give_no_rows():
    good, failed = Rollout(turns=(turn([5], [7]),)), Rollout(error="gone")
    unscored = Rollout(turns=(turn([5], [8]),), error="reward: no")
    group = Group(task=TASK, rollouts=(good, failed, unscored))
    assert samples([group], [[]], merge=False) == []
    nothing = np.zeros(0, np.float32)
    rows = samples([group], [[np.ones(1, np.float32), nothing, nothing]], merge=False)
    assert [row.targets.tolist() for row in rows] == [[7]]


def test_equal_replies_become_one_row_with_summed_advantages():
    same, other = Rollout(turns=(turn([5], [7, 2]),)), Rollout(turns=(turn([5], [7, 3]),))
    rows = rows_of(same, other, same, values=[0.5, -1.0, 0.5], merge=True)
    assert [(row.targets.tolist(), row.advantages.tolist(), row.count) for row in rows] == [
        ([7, 2], [1.0, 1.0], 2),
        ([7, 3], [-1.0, -1.0], 1),
    ]


def test_equal_replies_to_other_prompts_stay_apart():
    rows = rows_of(Rollout(turns=(turn([5, 6], [7]),)), Rollout(turns=(turn([5], [6, 7]),)), values=[1, 1], merge=True)
    assert len(rows) == 2


def test_a_datum_has_exactly_the_keys_of_an_rl_loss():
    (row,) = rows_of(Rollout(turns=(turn([5, 6], [7, 2]),)), values=[0.5])
    datum = row.datum()
    assert datum.model_input.to_ints() == [5, 6, 7]
    assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [6, 7, 2]
    assert datum.loss_fn_inputs["advantages"].to_numpy().dtype == np.float32
