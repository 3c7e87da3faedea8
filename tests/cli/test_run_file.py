"""`tinsmith check` summarises each kind of run file; commands without a run file are errors."""

from __future__ import annotations

import pytest
import yaml

from tinsmith.cli import check, run_file
from tinsmith.errors import ConfigError

SMALL = {
    "model": {"name": "tiny"},
    "tasks": {"train": {"type": "addition"}, "held_out": 5},
    "rewards": [{"type": "number"}],
}
TRINITY = {
    "mode": "bench",
    "checkpoint_root_dir": "out",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": {"model_path": "tiny", "max_prompt_tokens": 64, "max_response_tokens": 16, "tinker": {"enable": True}},
    "buffer": {
        "batch_size": 4,
        "explorer_input": {
            "eval_tasksets": [{"name": "e", "path": "openai/gsm8k", "split": "test"}],
            "default_workflow_type": "math_workflow",
        },
    },
}


FILE_BUFFER = ("buffer={type: file}",)
STAGES = [{"name": "one", "steps": 2}, {"name": "two", "algorithm": {"type": "rloo"}, "epochs": 1}]


@pytest.mark.parametrize(
    ("values", "words", "summary"),
    [
        (SMALL, ("steps=3",), "is valid: grpo on tiny, 3 steps"),
        (SMALL, ("epochs=0.5",), "is valid: grpo on tiny, 0.5 epochs"),
        (SMALL, ("steps=3", "mode=explore", *FILE_BUFFER), "is valid: mode explore, grpo on tiny, 3 steps"),
        (SMALL, ("epochs=2", "mode=train", *FILE_BUFFER), "is valid: mode train, grpo on tiny, 2 epochs"),
        (SMALL, ("mode=bench",), "is valid: comparison of checkpoints on tiny"),
        (TRINITY, (), "a file of Trinity-RFT, is valid: comparison of checkpoints on tiny"),
        ({**SMALL, "stages": STAGES}, (), "is valid: 2 stages on tiny: one (grpo, 2 steps), two (rloo, 1 epoch)"),
    ],
    ids=["steps", "epochs", "explore", "train", "bench", "bench of Trinity", "stages"],
)
def test_check_summarises_the_run(tmp_path, capsys, values, words, summary):
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(values))
    for file, config in (((str(tmp_path / "file.yaml"),), None), ((), tmp_path / "file.yaml")):
        check.check(*file, *words, config=config)
        assert capsys.readouterr().out.endswith(f"{summary}\n")


@pytest.mark.parametrize("command", [check.check, run_file.show, run_file.convert])
def test_commands_without_a_file_are_errors(command):
    with pytest.raises(ConfigError, match=f"tinsmith .*{command.__name__} needs a run file"):
        command()


def written(tmp_path, **changes) -> str:
    """A run file with ten rows of data beside it, in the working directory."""
    rows = "".join(f'{{"question": "Q{n}?", "answer": "{n}", "bad": "no"}}\n' for n in range(10))
    (tmp_path / "rows.jsonl").write_text(rows)
    values = {"tasks": {"train": {"type": "jsonl", "path": "rows.jsonl"}}, "groups_per_step": 2, "steps": 3, **changes}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SMALL, **values}))
    return "run.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a test, with a cache of the datasets package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


SFT = {"algorithm": {"type": "sft"}, "tasks": {}, "rewards": []}
ROWS = {"type": "jsonl", "path": "rows.jsonl"}
SUMS = {"type": "tasks", "train": ROWS, "rewards": [{"type": "number"}]}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["data: 9 tasks to train on, 1 held out; 4.5 steps per epoch, of 2 each", "-> '"]),
        (
            {"tasks": {"train": ROWS, "eval": {"a": ROWS, "b": {"type": "largest", "size": 3}}, "held_out": 2}},
            ["a 2, b 2 held out"],
        ),
        ({**SFT, "demonstrations": {"data": ROWS}}, ["10 demonstrations, 5 steps per epoch", "rows/0: 'Q0?' -> '0'"]),
        ({"stages": [{"name": "x"}, {"name": "y"}]}, ["stage x: data: 9 tasks", "stage y: data: 9 tasks"]),
        (
            {"environments": [{"name": "sums", **SUMS}], "tasks": {}, "rewards": []},
            ["9 tasks to train on, sums 1 held"],
        ),
    ],
    ids=["rows", "eval", "sft", "stages", "environments"],
)
def test_check_counts_the_data_and_shows_prompts(folder, capsys, changes, lines):
    check.check(written(folder, **changes))
    printed = capsys.readouterr().out
    assert [line for line in lines if line not in printed] == [], printed


def train(**keys) -> dict:
    """Tasks of the rows, with other keys of the source."""
    return {"tasks": {"train": {**ROWS, **keys}}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (train(path="none.jsonl"), "no data file none.jsonl. Did you mean 'rows.jsonl'"),
        (train(prompt="{problem}"), "line 1: '{problem}' cannot be filled: there is no field 'problem'"),
        (train(answer="{solution}"), "there is no field 'solution'"),
        (train(images="picture"), "line 1 has no field 'picture'"),
        (train(images="bad"), "line 1: there is no image file no"),
        ({"tasks": {**train()["tasks"], "held_out": 10}}, "has 10 tasks; 10 held out leave none"),
        ({"tasks": {**train()["tasks"], "eval": {"type": "files", "path": "no/*.csv"}}}, "No file matches no/"),
        ({"tasks": {"train": ROWS, "eval": ROWS}}, "Every training task is held out too"),
        ({"stages": [{"name": "x"}, {"name": "y", **train(path="y.jsonl")}]}, "no data file y.jsonl"),
        ({**SFT, "demonstrations": {"data": {**ROWS, "answer": "{reply}"}}}, "no field 'reply'"),
        ({**SFT, "demonstrations": {"data": ROWS}, "algorithm": {"type": "dpo"}}, "has no rejected reply"),
        ({"steps": 0, "epochs": 0.1}, "make less than one step"),
        ({"tasks": {"train": {"type": "hub", "name": "/none"}}}, "no folder /none"),
    ],
)
def test_check_refuses_data_that_the_run_cannot_use(folder, changes, sentence):
    with pytest.raises(ConfigError) as caught:
        check.check(written(folder, **changes))
    assert sentence in str(caught.value)


def test_check_notes_data_that_it_cannot_reach(folder, capsys):
    file = written(folder, tasks={"train": {"type": "hub", "name": "openai/gsm8k", "subset": "main"}})
    check.check(file)
    printed = capsys.readouterr().out
    assert "not opened: The dataset openai/gsm8k cannot be reached" in printed
    assert "is valid" in printed
    tasks = {"train": {"type": "hub", "name": "openai/gsm8k"}, "eval": {"type": "jsonl", "path": "none.jsonl"}}
    with pytest.raises(ConfigError, match=r"no data file none.jsonl"):
        check.check(written(folder, tasks=tasks))
