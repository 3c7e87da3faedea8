"""Held-out tasks are never drawn for training, and a cursor resumes the order of the others."""

from __future__ import annotations

import json

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data.sources import Addition, Jsonl, Largest
from tinsmith.rl.data.tasks import TasksConfig, split
from tinsmith.rl.types import Group, Rollout


def test_held_out_tasks_are_never_drawn():
    sampler, held_out = split(TasksConfig(train=Addition(high=14), held_out=5), seed=0)
    drawn = sampler.draw(60)
    assert len(held_out[""]) == 5
    assert {task.id for task in drawn}.isdisjoint(task.id for task in held_out[""])
    assert len({task.id for task in drawn}) == 20


def test_epoch_has_every_task_once_in_another_order():
    sampler, _ = split(TasksConfig(train=Addition(high=14), held_out=5), seed=0)
    first, second = sampler.draw(20), sampler.draw(20)
    assert {task.id for task in first} == {task.id for task in second}
    assert first != second


def test_seed_changes_the_order_but_not_the_split():
    (first, first_held_out), (second, second_held_out) = (
        split(TasksConfig(train=Addition(), held_out=50), seed) for seed in (0, 1)
    )
    assert first_held_out == second_held_out
    assert first.draw(10) != second.draw(10)


def test_restored_cursor_continues_the_order():
    config = TasksConfig(train=Largest(size=30), held_out=7)
    whole, _ = split(config, seed=3)
    tasks = whole.draw(50)
    resumed, _ = split(config, seed=3)
    assert resumed.draw(18) == tasks[:18]
    cursor, (again, _) = resumed.cursor, split(config, seed=3)
    again.restore(cursor, {})
    assert again.draw(32) == tasks[18:]


def test_rows_with_held_out_questions_are_skipped(tmp_path):
    rows = [{"question": question, "answer": "1"} for question in ["same", "same", "same", "other"]]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.jsonl").write_text(json.dumps(rows[0]))
    train, held = Jsonl(path=str(tmp_path / "t.jsonl")), Jsonl(path=str(tmp_path / "e.jsonl"))
    sampler, held_out = split(TasksConfig(train=train, eval=held), seed=0)
    assert len(held_out[""]) == 1
    assert {task.messages[0].content for task in sampler.draw(10)} == {"other"}
    sampler, _ = split(TasksConfig(train=held, eval=held), seed=0)
    with pytest.raises(ConfigError, match="held out too"):
        sampler.draw(1)


@pytest.mark.parametrize(
    "change", [{"system": "You are careful."}, {"reply_prefix": "<think>"}, {"prompt": "\n{question} "}]
)
@pytest.mark.parametrize("changed", ["train", "eval"])
def test_held_out_question_is_recognized_in_other_prompts(tmp_path, change, changed):
    rows = [{"question": question, "answer": "1"} for question in ["same", "other"]]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.jsonl").write_text(json.dumps(rows[0]))
    sources = {"train": {"path": str(tmp_path / "t.jsonl")}, "eval": {"path": str(tmp_path / "e.jsonl")}}
    sources[changed] |= change
    config = TasksConfig.model_validate({name: {"type": "jsonl", **source} for name, source in sources.items()})
    sampler, _ = split(config, seed=0)
    questions = {message.content.strip() for task in sampler.draw(10) for message in task.messages}
    assert "other" in questions
    assert "same" not in questions


def test_split_without_training_tasks_is_an_error():
    with pytest.raises(ConfigError, match="leave none to train on"):
        split(TasksConfig(train=Addition(high=12), held_out=9), seed=0)


@pytest.mark.parametrize(
    ("size", "held"), [(1, 0), (2, 1), (4, 1), (10, 1), (11, 2), (200, 20), (999, 100), (1000, 100), (5000, 100)]
)
def test_default_held_out_fits_the_data(size, held):
    sampler, held_out = split(TasksConfig(train=Largest(size=size)), seed=0)
    assert (len(held_out[""]), sampler.size) == (held, size - held)
    _, held_out = split(TasksConfig(train=Addition(), eval=Largest(size=size)), seed=0)
    assert len(held_out[""]) == min(size, 100)


def test_held_out_limits_the_eval_source():
    _, held_out = split(TasksConfig(train=Addition(), eval=Largest(size=10), held_out=4), seed=0)
    assert [task.id for task in held_out[""]] == [f"largest/{index}" for index in range(4)]
    _, held_out = split(TasksConfig(train=Addition(), eval=Largest(size=10), held_out=0), seed=0)
    assert len(held_out[""]) == 10


def test_learned_order_keeps_nothing_of_tasks_without_rewards(tmp_path):
    """Groups that were resampled or too stale are never reported; the state stays as large as the data."""
    rows = [{"id": f"row {n % 2}", "question": f"{n}?", "answer": "1"} for n in range(6)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = Jsonl(path=str(tmp_path / "t.jsonl"))

    def sampler(order: str):
        return split(TasksConfig.model_validate({"train": train, "held_out": 0, "order": {"type": order}}), seed=0)[0]

    learning, fixed = sampler("difficulty"), sampler("shuffle")
    for _ in range(50):
        learning.draw(4)
        fixed.draw(4)
    assert len(learning.state["drawn"]) == 6
    assert fixed.state["drawn"] == {}


def test_task_that_is_drawn_again_learns_from_both_groups():
    sampler, _ = split(
        TasksConfig.model_validate({"train": Addition(high=10), "held_out": 0, "order": {"type": "difficulty"}}), 0
    )
    (task,) = sampler.draw(1)
    while task not in sampler.draw(1):
        pass
    beliefs = [sampler.state["lanes"][0]]
    for _ in range(2):
        rollout = Rollout.single((), 1.0)
        sampler.update([Group(task=task, rollouts=(rollout,))])
        beliefs.append(sampler.state["lanes"][0])
    assert beliefs[0] != beliefs[1] != beliefs[2]
