"""Held-out tasks are never trained on; the order of the others is one number."""

from __future__ import annotations

import json

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data.sources import Addition, Jsonl, Largest
from tinsmith.rl.data.tasks import TasksConfig, split


def test_held_out_tasks_are_never_drawn():
    deck, held_out = split(TasksConfig(train=Addition(high=14), held_out=5), seed=0)
    drawn = deck.draw(60)
    assert len(held_out[""]) == 5
    assert {task.id for task in drawn}.isdisjoint(task.id for task in held_out[""])
    assert len({task.id for task in drawn}) == 20


def test_each_epoch_has_every_task_once_in_another_order():
    deck, _ = split(TasksConfig(train=Addition(high=14), held_out=5), seed=0)
    first, second = deck.draw(20), deck.draw(20)
    assert {task.id for task in first} == {task.id for task in second}
    assert first != second


def test_the_split_does_not_hang_on_the_runs_seed_but_the_order_does():
    (one, held_one), (two, held_two) = (split(TasksConfig(train=Addition(), held_out=50), seed) for seed in (0, 1))
    assert held_one == held_two
    assert one.draw(10) != two.draw(10)


def test_a_cursor_goes_on_where_the_other_stopped():
    config = TasksConfig(train=Largest(size=30), held_out=7)
    whole, _ = split(config, seed=3)
    tasks = whole.draw(50)
    resumed, _ = split(config, seed=3)
    assert resumed.draw(18) == tasks[:18]
    cursor, (again, _) = resumed.cursor, split(config, seed=3)
    again.restore(cursor, {})
    assert again.draw(32) == tasks[18:]


def test_rows_that_ask_what_is_held_out_are_passed_over(tmp_path):
    rows = [{"question": question, "answer": "1"} for question in ["same", "same", "same", "other"]]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.jsonl").write_text(json.dumps(rows[0]))
    train, held = Jsonl(path=str(tmp_path / "t.jsonl")), Jsonl(path=str(tmp_path / "e.jsonl"))
    deck, held_out = split(TasksConfig(train=train, eval=held), seed=0)
    assert len(held_out[""]) == 1
    assert {task.messages[0].content for task in deck.draw(10)} == {"other"}
    deck, _ = split(TasksConfig(train=held, eval=held), seed=0)
    with pytest.raises(ConfigError, match="held out too"):
        deck.draw(1)


@pytest.mark.parametrize(
    "change", [{"system": "You are careful."}, {"reply_prefix": "<think>"}, {"prompt": "\n{question} "}]
)
@pytest.mark.parametrize("other_way", ["train", "eval"])
def test_a_held_out_question_is_known_however_it_is_asked(tmp_path, change, other_way):
    rows = [{"question": question, "answer": "1"} for question in ["same", "other"]]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "e.jsonl").write_text(json.dumps(rows[0]))
    sources = {"train": {"path": str(tmp_path / "t.jsonl")}, "eval": {"path": str(tmp_path / "e.jsonl")}}
    sources[other_way] |= change
    config = TasksConfig.model_validate({name: {"type": "jsonl", **one} for name, one in sources.items()})
    deck, _ = split(config, seed=0)
    asked = {message.content.strip() for task in deck.draw(10) for message in task.messages}
    assert "other" in asked
    assert "same" not in asked


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(ConfigError, match="leave none to train on"):
        split(TasksConfig(train=Addition(high=12), held_out=9), seed=0)


def test_a_source_of_its_own_may_be_cut_to_its_first_tasks():
    _, held_out = split(TasksConfig(train=Addition(), eval=Largest(size=10), held_out=4), seed=0)
    assert [task.id for task in held_out[""]] == [f"largest/{index}" for index in range(4)]
    _, held_out = split(TasksConfig(train=Addition(), eval=Largest(size=10), held_out=0), seed=0)
    assert len(held_out[""]) == 10
