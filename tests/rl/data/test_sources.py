"""Task sources are deterministic and name the fault in data that they cannot use."""

from __future__ import annotations

import json

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data.row_mapping import RowMapping
from tinsmith.rl.data.sources import Addition, Hub, Jsonl, Largest, ReasoningGym


def test_addition_has_every_pair_once():
    tasks = Addition().load()
    assert len(tasks) == 90 * 90
    assert tasks[29 * 90 + 3].messages[0].content == "What is 39 + 13? Answer with the number only."
    assert tasks[29 * 90 + 3].answer == "52"
    assert len({task.messages for task in tasks[:200]}) == 200


def test_largest_is_deterministic_and_correct():
    first, again = Largest().load()[7], Largest().load()[7]
    assert first == again
    assert first != Largest(seed=1).load()[7]
    numbers = [int(word.strip(",?")) for word in first.messages[0].content.split() if word[0].isdigit()]
    assert len(set(numbers)) == 4
    assert first.answer == str(max(numbers))


def test_generated_tasks_are_a_sequence():
    tasks = Largest(size=3).load()
    assert [task.id for task in tasks] == ["largest/0", "largest/1", "largest/2"]
    assert tasks[-1] == tasks[2]
    with pytest.raises(IndexError):
        tasks[3]


def test_reasoning_gym_task_keeps_its_entry_in_extra():
    source = ReasoningGym(dataset="basic_arithmetic", size=5, config={"max_terms": 2}, prompt="{question} Go.")
    task = source.load()[2]
    assert task == source.load()[2]
    assert task.extra["answer"] == task.answer
    assert task.messages[0].content == f"{task.extra['question']} Go."


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (ReasoningGym(dataset="basic_aritmetic"), "Did you mean 'basic_arithmetic'"),
        (ReasoningGym(dataset="basic_arithmetic", config={"max_term": 2}), "rejects its config"),
        (ReasoningGym(dataset="basic_arithmetic", config={"min_terms": 0}), "rejects its config"),
        (Addition(low=5, high=4), "high 4 is below low 5"),
        (Jsonl(path="/no/such.jsonl"), "There is no data file"),
    ],
)
def test_load_errors_give_the_reason(source, sentence):
    with pytest.raises(ConfigError) as caught:
        source.load()
    assert sentence in str(caught.value)


def test_template_with_unknown_field_is_an_error():
    with pytest.raises(ConfigError, match=r"addition: .* cannot be filled: there is no field 'c'") as caught:
        Addition(prompt="{a} + {c}").load()[0]
    assert "a, b" in caught.value.hint


def write(path, rows):
    """Write rows to a JSON Lines file with blank lines between, and return its path."""
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("template", "row", "answer"),
    [
        ("{reward_model.ground_truth}", {"reward_model.ground_truth": "7"}, "7"),
        ("{reward_model.ground_truth}", {"reward_model": {"ground_truth": "7"}}, "7"),
        ("{answers[1].text}", {"answers": [{"text": "6"}, {"text": "7"}]}, "7"),
        ("{answer[value]}", {"answer": {"value": 7}}, "7"),
        ("{a:b}", {"a:b": "7", "a": "6"}, "7"),
        ("{a!b}", {"a!b": "7"}, "7"),
        ("{final answer}, {1}", {"final answer": "{7}", "1": "x"}, "{7}, x"),
        ("{number:.1f} {{}}", {"number": 7}, "7.0 {}"),
        ("{answer}", {"answer": True}, "true"),
        ("{answer}", {"answer": ["é", {"of": None}]}, '["é", {"of": null}]'),
        ("{answer}", {"answer": "é".encode()}, "é"),
    ],
)
def test_template_field_is_a_literal_name_or_a_path(template, row, answer):
    assert RowMapping(prompt="?", answer=template).task("t/0", row).answer == answer


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{answer.value}", "cannot be filled: .*Its fields are: answer, more"),
        ("{more.value}", "cannot be filled"),
        ("{more[1]}", "cannot be filled"),
        ("{answer.__class__}", "cannot be filled"),
        ("\\boxed{}", "braces twice"),
    ],
)
def test_template_path_without_value_is_an_error(template, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RowMapping(prompt="?", answer=template).task("t/0", {"answer": "7", "more": [1]})


def test_answer_optional_allows_missing_answers():
    fields = RowMapping(prompt="?", answer="{answer}", answer_optional=True)
    assert [fields.task("t/0", row).answer for row in ({}, {"answer": None}, {"answer": 7})] == ["", "", "7"]
    with pytest.raises(ConfigError, match="cannot be filled"):
        RowMapping(prompt="?").task("t/0", {})


def test_chat_is_read_from_a_nested_field():
    chat = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]
    assert RowMapping(prompt="{said.chat}").demonstration("l/0", {"said": {"chat": chat}}).messages[1].content == "one"


def test_jsonl_answer_after_keeps_text_after_the_marker(tmp_path):
    path = write(
        tmp_path / "gsm.jsonl",
        [{"question": "2+2?", "answer": "Two and two.\n#### 4"}, {"question": "q", "answer": "#### 5"}],
    )
    tasks = Jsonl(path=path, answer_after="####", prompt="Q: {question}").load()
    assert [(task.id, task.answer) for task in tasks] == [("gsm/0", "4"), ("gsm/1", "5")]
    assert tasks[0].messages[0].content == "Q: 2+2?"


def test_extra_copies_fields_into_the_task(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"question": "2+2?", "answer": "4", "level": 3}])
    assert Jsonl(path=path).load()[0].extra == {}
    assert Jsonl(path=path, extra=("level",)).load()[0].extra == {"level": 3}
    assert Jsonl(path=path, extra=("*",)).load()[0].extra == {"question": "2+2?", "answer": "4", "level": 3}
    with pytest.raises(ConfigError, match="has no field 'levl'"):
        Jsonl(path=path, extra=("levl",)).load()


def test_jsonl_prompt_may_be_a_chat(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    task = Jsonl(path=write(tmp_path / "c.jsonl", [{"messages": chat}]), prompt="{messages}", answer="").load()[0]
    assert [(message.role, message.content) for message in task.messages] == [("system", "Be brief."), ("user", "2+2?")]
    assert task.answer == ""


def test_jsonl_errors_name_the_row(tmp_path):
    with pytest.raises(ConfigError, match=r"x.jsonl, line 1: .*: there is no field 'question'") as caught:
        Jsonl(path=write(tmp_path / "x.jsonl", [{"problem": "p", "answer": "1"}])).load()
    assert "answer, problem" in caught.value.hint
    (tmp_path / "y.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question"\n')
    with pytest.raises(ConfigError, match=r"y.jsonl, line 2"):
        Jsonl(path=str(tmp_path / "y.jsonl")).load()
    (tmp_path / "z.jsonl").write_text("[1]\n")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        Jsonl(path=str(tmp_path / "z.jsonl")).load()


def test_hub_reads_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sums").mkdir()
    write(tmp_path / "sums" / "train.jsonl", [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}])
    tasks = Hub(name=str(tmp_path / "sums")).load()
    assert [task.answer for task in tasks] == ["2", "3"]
    with pytest.raises(ConfigError, match="There is no folder"):
        Hub(name=str(tmp_path / "none")).load()
