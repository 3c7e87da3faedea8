"""How long a run is, by which weights it samples, and its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dialects.trinity.files import SMALL, laid, read
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError


def test_epochs_or_steps_whichever_is_told(tmp_path: Path):
    by_steps = read(tmp_path, ("buffer.total_steps", 5), ("buffer.total_epochs", 2)).settings
    assert (by_steps.steps, by_steps.epochs) == (5, None)
    by_epochs = read(tmp_path, ("buffer.total_steps", None), ("buffer.total_epochs", 2)).settings
    assert (by_epochs.steps, by_epochs.epochs) == (0, 2)
    bounded = read(tmp_path, ("buffer.total_steps", None), ("trainer.total_steps", 7)).settings
    assert (bounded.steps, bounded.epochs) == (7, 1)
    assert read(tmp_path, ("buffer.total_steps", 5), ("trainer.total_steps", 2)).settings.steps == 2


def test_a_training_batch_of_its_own_makes_fewer_or_more_steps(tmp_path: Path):
    run = read(tmp_path, ("buffer.total_steps", 6), ("buffer.train_batch_size", 32)).settings
    assert (run.groups_per_step, run.group_size, run.steps) == (8, 4, 3)


WORLD = """
from tinsmith.rl.workflows.multi_turn import Answer, Environment

class Room(Environment):
    def step(self, reply):
        return Answer(message="no", reward=1.0, done=True)
"""


@pytest.mark.parametrize("name", ["multi_step_grpo", "gigpo"])
def test_a_training_batch_of_turns_is_the_rollouts_of_one_batch_of_tasks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "trinity_room.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    batches = (("buffer.batch_size", 16), ("algorithm.repeat_times", 16), ("buffer.train_batch_size", 7680))
    workflow = "buffer.explorer_input.default_workflow_type"
    found = read(tmp_path, *batches, ("algorithm.algorithm_type", name), (workflow, "trinity_room.Room"))
    assert (found.settings.groups_per_step, found.settings.steps) == (16, 3)
    assert any("buffer.train_batch_size: it counts turns" in note for note in found.notes)
    single = read(tmp_path, ("algorithm.algorithm_type", name), ("buffer.train_batch_size", 8)).settings
    assert (single.groups_per_step, single.steps) == (2, 6)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"sync_interval": 10}, ("fixed", 10, None)),
        ({"sync_style": "EXPLORER_DRIVEN", "sync_interval": 2}, ("on_demand", 2, None)),
        ({"sync_style": "dynamic_by_trainer", "sync_interval": 2, "trainer_sync_interval": 3}, ("on_publish", 2, 3)),
        ({"sync_style": "fully_async", "sync_interval": 2}, ("live", 2, None)),
        ({"sync_style": "fully_async", "explorer_sync_interval": 1, "trainer_sync_interval": 4}, ("live", 1, 4)),
    ],
)
def test_styles_and_intervals(given: dict[str, Any], becomes: tuple[Any, ...], tmp_path: Path):
    sync = read(tmp_path, ("synchronizer", given)).settings.sync
    assert (sync.style, sync.interval, sync.publish_every) == becomes


def test_methods_are_two(tmp_path: Path):
    methods = {
        word: read(tmp_path, ("synchronizer.sync_method", word)).settings.sync.method
        for word in ("nccl", "online", "memory", "checkpoint", "Offline")
    }
    assert methods == {
        "nccl": None,
        "online": None,
        "memory": None,
        "checkpoint": "checkpoint",
        "Offline": "checkpoint",
    }


def test_intervals_of_both_sides_are_alike_in_style_fixed(tmp_path: Path):
    with pytest.raises(ConfigError, match="Make them alike"):
        read(tmp_path, ("synchronizer", {"sync_interval": 1, "trainer_sync_interval": 2}))


def test_attempts_are_those_that_the_file_says(tmp_path: Path):
    explorer = {"max_timeout": 60, "max_retry_times": 1, "dynamic_timeout": {"enable": True, "ratio": 2.0}}
    rollout = read(tmp_path, ("explorer", explorer)).settings.rollout
    assert (rollout.timeout, rollout.retries, rollout.timeout_ratio, rollout.partial) == (60.0, 1, 2.0, "drop")


def test_stages_are_whole_files_with_sections_of_their_own(tmp_path: Path):
    learn = {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-4}},
        "buffer": {
            "train_batch_size": 8,
            "total_steps": 2,
            "trainer_input": {"experience_buffer": {"storage_type": "file", "path": "chats.jsonl"}},
        },
    }
    found = read(tmp_path, ("stages", [{"stage_name": "warm", **learn}, {"stage_name": "rl"}]))
    first, second = found.settings.stage_config(1), found.settings.stage_config(2)
    assert (first.algorithm.type, first.steps, first.optimizer.learning_rate) == ("sft", 2, 1e-4)
    assert first.demonstrations is not None
    assert first.demonstrations.per_step == 8
    assert (second.algorithm.type, second.steps, second.optimizer.learning_rate) == ("grpo_std", 3, 1e-6)
    assert second.demonstrations is None
    assert second.model.load_from
    assert (first.folder, second.folder) == ("out/Trinity-RFT/small/01-warm", "out/Trinity-RFT/small/02-rl")


WARM: dict[str, Any] = {
    "stage_name": "warm",
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer": {
        "train_batch_size": 8,
        "total_steps": 2,
        "trainer_input": {"experience_buffer": {"storage_type": "file", "path": "chats.jsonl"}},
    },
}
OWN_FORMAT = "buffer.trainer_input.experience_buffer.format"
DTYPE = "explorer.rollout_model.dtype"
LORA = (("model.tinker.enable", False), ("model.lora_configs", [{"lora_rank": 8}]))


def test_stages_have_one_chat_template_and_one_precision(tmp_path: Path):
    warm = laid(WARM, f"{OWN_FORMAT}.enable_thinking", False)
    found = read(tmp_path, *LORA, ("stages", [warm, laid({"stage_name": "rl"}, DTYPE, "float32")]))
    for number in (1, 2):
        stage = found.settings.stage_config(number)
        assert stage.model.chat_template_values == {"enable_thinking": False}
        assert stage.service.dtype == "float32"
    assert any("enable_thinking: all stages use that of stage warm" in note for note in found.notes)
    assert any("explorer.rollout_model.dtype: all stages use that of stage rl" in note for note in found.notes)


def test_stages_that_want_two_are_refused_by_trinitys_names(tmp_path: Path):
    rollout = {"rollout_model": {"enable_thinking": True, "dtype": "float32"}}
    warm = {**laid(WARM, f"{OWN_FORMAT}.enable_thinking", False), "explorer": {"rollout_model": {"dtype": "bfloat16"}}}
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, *LORA, ("stages", [warm, {"stage_name": "rl", "explorer": rollout}]))
    assert "stage rl: 'enable_thinking': the stages differ." in str(refusal.value)
    assert "stage rl: 'explorer.rollout_model.dtype': the stages differ." in str(refusal.value)


def test_faults_of_stages_name_them(tmp_path: Path):
    stages = [{"stage_name": "one", "algorithm": {"algorithm_type": "grop"}}, {"mod": "both"}]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, ("stages", stages))
    assert "stage one: 'algorithm.algorithm_type'" in str(refusal.value)
    assert "'stages[1].stage_name'" in str(refusal.value)
    assert "Did you mean 'mode'?" in str(refusal.value)


def test_a_file_in_stages_is_the_same_when_converted(tmp_path: Path):
    from tinsmith.cli.run_file import _plain, _yaml

    stages = [{"stage_name": "one", "buffer": {**SMALL["buffer"], "total_steps": 1}}, {"stage_name": "two"}]
    found = read(tmp_path, ("stages", stages)).settings
    ours = tmp_path / "ours.yaml"
    ours.write_text(_yaml(_plain(found)))
    assert read_run(ours).settings.model_dump() == found.model_dump()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("algorithm.optimizer.min_lr_ratio", 0.5, "a constant schedule does not decay"),
        ("explorer.over_rollout.wait_after_min", 5.0, "only with a ratio above 0"),
        ("explorer.dynamic_timeout.warmup_min_steps", 5, "only with enable: true"),
        ("explorer.max_inflight_batches", 5, "only with sync_style fully_async"),
    ],
)
def test_what_counts_only_beside_another_key_is_told(tmp_path, key, value, words):
    assert any(key.rpartition(".")[0] in note and words in note for note in read(tmp_path, (key, value)).notes)


def test_of_two_ways_to_say_one_thing_the_one_that_does_not_count_is_told(tmp_path):
    optimizer = "algorithm.optimizer"
    given = read(tmp_path, (f"{optimizer}.lr_warmup_steps", 3), (f"{optimizer}.lr_warmup_steps_ratio", 0.5))
    assert any("_ratio: it has an effect only where lr_warmup_steps is -1" in note for note in given.notes)
    given = read(tmp_path, (f"{optimizer}.warmup_style", "cosine"), (f"{optimizer}.lr_scheduler_type", "linear"))
    assert given.settings.optimizer.schedule == "cosine"
    assert any("lr_scheduler_type: warmup_style" in note for note in given.notes)


def test_all_of_it_counts_beside_its_key(tmp_path):
    explorer = "explorer"
    run = read(
        tmp_path,
        ("synchronizer.sync_style", "fully_async"),
        ("algorithm.optimizer.lr_scheduler_type", "linear"),
        ("algorithm.optimizer.min_lr_ratio", 0.5),
        (f"{explorer}.over_rollout.ratio", 0.25),
        (f"{explorer}.over_rollout.wait_after_min", 5.0),
        (f"{explorer}.dynamic_timeout.enable", True),
        (f"{explorer}.dynamic_timeout.warmup_min_steps", 7),
        (f"{explorer}.max_inflight_batches", 5),
    ).settings
    assert (run.optimizer.min_ratio, run.rollout.over.wait) == (0.5, 5.0)
    assert (run.rollout.timeout_warmup, run.sync.in_flight) == (7, 5)


LESSONS = "buffer.trainer_input.experience_buffer"
TAUGHT = (
    ("algorithm.algorithm_type", "sft"),
    ("mode", "train"),
    ("buffer.train_batch_size", 8),
    (f"{LESSONS}.storage_type", "file"),
    (f"{LESSONS}.path", "chats.jsonl"),
)


def test_tools_of_rows_are_before_a_lesson_as_in_trinity(tmp_path):
    run = read(tmp_path, *TAUGHT).settings
    assert run.demonstrations is not None
    assert run.demonstrations.data.tools_key == "tools"


@pytest.mark.parametrize(
    ("kind", "key"), [("sft", "response_key"), ("sft", "chosen_key"), ("cpt", "messages_key"), ("dpo", "tools_key")]
)
def test_a_field_that_these_lessons_have_not_is_told(tmp_path, kind, key):
    notes = read(tmp_path, *TAUGHT, ("algorithm.algorithm_type", kind), (f"{LESSONS}.format.{key}", "some")).notes
    assert any(f"{key}: {kind} does not use it with prompt_type messages" in note for note in notes)


TASKS = "buffer.explorer_input.taskset"


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ((("explorer.rollout_model.dtype", "bfloat16"),), "rollout_model.dtype: with model.tinker the server decides"),
        ((*LORA, ("explorer.rollout_model.dtype", "float16")), "float16 is not supported"),
        (((f"{TASKS}.path", "rows.jsonl"), (f"{TASKS}.split", "test")), f"{TASKS}.split: it applies to datasets"),
        ((*LORA, ("model.lora_configs[].path", "tinker://a/weights/b"), ("model.lora_configs[].lora_rank", 8)), "own"),
    ],
)
def test_what_is_near_or_read_elsewhere_is_told(tmp_path, pairs, words):
    assert any(words in note for note in read(tmp_path, *pairs).notes)
