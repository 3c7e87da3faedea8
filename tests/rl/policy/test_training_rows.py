"""Training rows hold the sampled tokens, their logprobs and advantages, position by position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinsmith.rl.policy.sdk import as_datum
from tinsmith.rl.policy.training_rows import (
    gather_from_rows,
    merge_identical_rows,
    rows_from_trajectory,
    scatter_to_rows,
)
from tinsmith.rl.types import Trajectory, Turn


def turn(prompt, tokens, model="") -> Turn:
    """A turn with logprob -0.1 * token for each token."""
    logprobs = tuple(-0.1 * token for token in tokens)
    return Turn(prompt=tuple(prompt), tokens=tuple(tokens), logprobs=logprobs, text="", stop="stop", model=model)


def rows(*trajectories: Trajectory, values: list[float]):
    """Training rows of trajectories, with one advantage for each."""
    training_rows = []
    for trajectory, value in zip(trajectories, values, strict=True):
        bare = rows_from_trajectory(trajectory)
        columns = scatter_to_rows(bare, np.full(sum(int(row.mask.sum()) for row in bare), value))
        training_rows += [replace(row, advantages=column) for row, column in zip(bare, columns, strict=True)]
    return training_rows


def test_row_is_shifted_by_one_and_masks_the_prompt():
    (row,) = rows(Trajectory(turns=(turn([5, 6], [7, 2]),)), values=[0.5])
    assert row.tokens.tolist() == [5, 6, 7]
    assert row.targets.tolist() == [6, 7, 2]
    assert row.advantages.tolist() == [0.0, 0.5, 0.5]
    assert row.logprobs == pytest.approx([0.0, -0.7, -0.2])
    assert row.mask.tolist() == [False, True, True]


def test_turns_that_extend_each_other_share_a_row():
    trajectory = Trajectory(turns=(turn([5], [7, 8]), turn([5, 7, 8, 9, 9], [3])))
    (row,) = rows_from_trajectory(trajectory)
    (row,) = (replace(row, advantages=column) for column in scatter_to_rows([row], np.array([1.0, 2.0, 3.0])))
    assert row.tokens.tolist() == [5, 7, 8, 9, 9]
    assert row.targets.tolist() == [7, 8, 9, 9, 3]
    assert row.advantages.tolist() == [1, 2, 0, 0, 3]
    assert row.mask.tolist() == [True, True, False, False, True]


def test_turn_with_another_history_starts_a_row():
    first, second = rows(Trajectory(turns=(turn([5], [7]), turn([5, 8], [3]))), values=[1.0])
    assert (first.targets.tolist(), second.targets.tolist()) == ([7], [8, 3])
    assert second.advantages.tolist() == [0, 1]


def test_turns_of_other_models_are_context_only():
    trajectory = Trajectory(turns=(turn([5], [7]), turn([5, 7], [8], model="big"), turn([5, 7, 8], [9])))
    (row,) = rows(trajectory, values=[1.0])
    assert row.targets.tolist() == [7, 8, 9]
    assert row.mask.tolist() == [True, False, True]


def test_scatter_and_gather_are_inverse():
    trajectory = Trajectory(turns=(turn([5], [7, 8]), turn([5, 9], [3])))
    bare = rows_from_trajectory(trajectory)
    columns = scatter_to_rows(bare, np.array([1.0, 2.0, 3.0]))
    assert [column.tolist() for column in columns] == [[1, 2], [0, 3]]
    assert gather_from_rows(bare, columns).tolist() == [1, 2, 3]


def test_merged_replies_sum_their_advantages():
    same, other = Trajectory(turns=(turn([5], [7, 2]),)), Trajectory(turns=(turn([5], [7, 3]),))
    merged_rows = merge_identical_rows(rows(same, other, same, values=[0.5, -1.0, 0.5]))
    assert [(row.targets.tolist(), row.advantages.tolist(), row.count) for row in merged_rows] == [
        ([7, 2], [1.0, 1.0], 2),
        ([7, 3], [-1.0, -1.0], 1),
    ]


def test_equal_replies_to_other_prompts_are_not_merged():
    apart = rows(Trajectory(turns=(turn([5, 6], [7]),)), Trajectory(turns=(turn([5], [6, 7]),)), values=[1, 1])
    assert len(merge_identical_rows(apart)) == 2


def test_datum_has_exactly_the_keys_of_an_rl_loss():
    (row,) = rows(Trajectory(turns=(turn([5, 6], [7, 2]),)), values=[0.5])
    datum = as_datum(row, {"logprobs": row.logprobs, "advantages": row.advantages})
    assert datum.model_input.to_ints() == [5, 6, 7]
    assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [6, 7, 2]
    assert datum.loss_fn_inputs["advantages"].to_numpy().dtype == np.float32
