"""Steps, synchronisation, stages and notes of translated files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.files import SMALL, read, with_key
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError


def test_length_is_set_by_steps_or_epochs(tmp_path: Path):
    by_steps = read(tmp_path, ("buffer.total_steps", 5), ("buffer.total_epochs", 2)).settings
    assert (by_steps.steps, by_steps.epochs) == (5, None)
    by_epochs = read(tmp_path, ("buffer.total_steps", None), ("buffer.total_epochs", 2)).settings
    assert (by_epochs.steps, by_epochs.epochs) == (0, 2)
    bounded = read(tmp_path, ("buffer.total_steps", None), ("trainer.total_steps", 7)).settings
    assert (bounded.steps, bounded.epochs) == (7, 1)
    assert read(tmp_path, ("buffer.total_steps", 5), ("trainer.total_steps", 2)).settings.steps == 2


def test_length_of_replies_is_enough(tmp_path: Path):
    sampling = read(tmp_path, ("model.max_prompt_tokens", None)).settings.sampling
    assert (sampling.max_tokens, sampling.max_prompt_tokens) == (16, None)


def test_train_batch_size_changes_the_number_of_steps(tmp_path: Path):
    run = read(tmp_path, ("buffer.total_steps", 6), ("buffer.train_batch_size", 32)).settings
    assert (run.groups_per_step, run.group_size, run.steps) == (8, 4, 3)


def test_smaller_train_batches_are_minibatches(tmp_path: Path):
    counted = (("trainer.save_interval", 5), ("trainer.total_steps", 9), ("algorithm.optimizer.lr_warmup_steps", 3))
    file = read(tmp_path, ("buffer.total_steps", 6), ("buffer.train_batch_size", 8), *counted)
    run = file.settings
    assert (run.groups_per_step, run.group_size, run.steps) == (4, 4, 4)
    assert (run.updates.minibatches, run.updates.epochs, run.updates.shuffle) == (2, 1, False)
    assert (run.checkpoint.every, run.optimizer.warmup_steps) == (3, 2)
    assert any("a step of the run is 2 training steps of Trinity" in note for note in file.notes)
    assert any("Trinity also sends weights between the training steps" in note for note in file.notes)


def test_weights_after_every_minibatch_of_a_batch_are_exact(tmp_path: Path):
    intervals = ("synchronizer", {"explorer_sync_interval": 2, "trainer_sync_interval": 4})
    file = read(tmp_path, ("buffer.train_batch_size", 8), intervals)
    assert (file.settings.sync.interval, file.settings.updates.minibatches) == (2, 2)
    assert not any("sends weights between" in note for note in file.notes)
    published = {"sync_style": "trainer_driven", "explorer_sync_interval": 1, "trainer_sync_interval": 6}
    file = read(tmp_path, ("buffer.train_batch_size", 8), ("synchronizer", published))
    assert (file.settings.sync.interval, file.settings.sync.publish_every) == (1, 3)


def test_batches_that_minibatches_do_not_divide_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"12 replies do not divide a batch evenly. Set a divisor"):
        read(tmp_path, ("buffer.train_batch_size", 12))


def test_epochs_and_old_logprobs_of_verl_are_translated(tmp_path: Path):
    verl = (("model.tinker.enable", False), ("model.lora_configs", [{"lora_rank": 16}]))
    config = {"actor_rollout_ref": {"actor": {"ppo_epochs": 3}, "strategy": "fsdp"}}
    changes = (("trainer.trainer_config", config), ("algorithm.bypass_old_logprobs", False))
    file = read(tmp_path, *verl, *changes)
    assert (file.settings.updates.epochs, file.settings.algorithm.correction.type) == (3, "proximal")
    assert any("only ppo_epochs has an effect" in note for note in file.notes)
    tinker = read(tmp_path, *changes)
    assert (tinker.settings.updates.epochs, tinker.settings.algorithm.correction.type) == (1, "none")
    assert sum("trainer for Tinker does not read it" in note for note in tinker.notes) == 2


WORLD = """
from tinsmith.rl.workflows.multi_turn import Answer, Environment

class Room(Environment):
    def step(self, reply):
        return Answer(message="no", reward=1.0, done=True)
"""


@pytest.mark.parametrize("name", ["multi_step_grpo", "gigpo"])
def test_train_batch_size_of_turns_has_no_effect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "trinity_room.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    batches = (("buffer.batch_size", 16), ("algorithm.repeat_times", 16), ("buffer.train_batch_size", 7680))
    workflow = "buffer.explorer_input.default_workflow_type"
    run_file = read(tmp_path, *batches, ("algorithm.algorithm_type", name), (workflow, "trinity_room.Room"))
    assert (run_file.settings.groups_per_step, run_file.settings.steps) == (16, 3)
    assert any("buffer.train_batch_size: it counts turns" in note for note in run_file.notes)
    single = read(tmp_path, ("algorithm.algorithm_type", name), ("buffer.train_batch_size", 8)).settings
    assert (single.groups_per_step, single.updates.minibatches, single.steps) == (4, 2, 3)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"sync_interval": 10}, ("fixed", 10, None)),
        ({"sync_style": "EXPLORER_DRIVEN", "sync_interval": 2}, ("on_demand", 2, None)),
        ({"sync_style": "dynamic_by_trainer", "sync_interval": 2, "trainer_sync_interval": 3}, ("on_publish", 2, 3)),
        ({"sync_style": "fully_async", "sync_interval": 2}, ("live", 2, None)),
        ({"sync_style": "fully_async", "explorer_sync_interval": 1, "trainer_sync_interval": 4}, ("live", 1, 4)),
    ],
)
def test_sync_style_and_intervals_are_translated(section: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path):
    sync = read(tmp_path, ("synchronizer", section)).settings.sync
    assert (sync.style, sync.interval, sync.publish_every) == expected


def test_sync_method_is_translated(tmp_path: Path):
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


def test_fixed_style_refuses_different_intervals(tmp_path: Path):
    with pytest.raises(ConfigError, match="Make them alike"):
        read(tmp_path, ("synchronizer", {"sync_interval": 1, "trainer_sync_interval": 2}))


def test_rollout_timeouts_and_retries_are_translated(tmp_path: Path):
    explorer = {"max_timeout": 60, "max_retry_times": 1, "dynamic_timeout": {"enable": True, "ratio": 2.0}}
    rollout = read(tmp_path, ("explorer", explorer)).settings.rollout
    assert (rollout.timeout, rollout.retries, rollout.timeout_ratio, rollout.partial) == (60.0, 1, 2.0, "drop")


def test_stages_replace_whole_sections(tmp_path: Path):
    learn = {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-4}},
        "buffer": {
            "train_batch_size": 8,
            "total_steps": 2,
            "trainer_input": {"experience_buffer": {"storage_type": "file", "path": "chats.jsonl"}},
        },
    }
    run_file = read(tmp_path, ("stages", [{"stage_name": "warm", **learn}, {"stage_name": "rl"}]))
    first, second = run_file.settings.stage_config(1), run_file.settings.stage_config(2)
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


def test_stages_share_chat_template_and_dtype(tmp_path: Path):
    warm = with_key(WARM, f"{OWN_FORMAT}.enable_thinking", False)
    run_file = read(tmp_path, *LORA, ("stages", [warm, with_key({"stage_name": "rl"}, DTYPE, "float32")]))
    for number in (1, 2):
        stage = run_file.settings.stage_config(number)
        assert stage.model.chat_template_values == {"enable_thinking": False}
        assert stage.service.dtype == "float32"
    assert any("enable_thinking: all stages use that of stage warm" in note for note in run_file.notes)
    assert any("explorer.rollout_model.dtype: all stages use that of stage rl" in note for note in run_file.notes)


def test_stages_with_different_dtypes_are_refused(tmp_path: Path):
    rollout = {"rollout_model": {"enable_thinking": True, "dtype": "float32"}}
    warm = {
        **with_key(WARM, f"{OWN_FORMAT}.enable_thinking", False),
        "explorer": {"rollout_model": {"dtype": "bfloat16"}},
    }
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, *LORA, ("stages", [warm, {"stage_name": "rl", "explorer": rollout}]))
    assert "stage rl: 'enable_thinking': the stages differ." in str(refusal.value)
    assert "stage rl: 'explorer.rollout_model.dtype': the stages differ." in str(refusal.value)


def test_faults_of_stages_name_the_stage(tmp_path: Path):
    stages = [{"stage_name": "one", "algorithm": {"algorithm_type": "grop"}}, {"mod": "both"}]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, ("stages", stages))
    assert "stage one: 'algorithm.algorithm_type'" in str(refusal.value)
    assert "'stages[1].stage_name'" in str(refusal.value)
    assert "Did you mean 'mode'?" in str(refusal.value)


def test_converted_stages_are_the_same_run(tmp_path: Path):
    from tinsmith.cli.run_file import _plain, _yaml

    stages = [{"stage_name": "one", "buffer": {**SMALL["buffer"], "total_steps": 1}}, {"stage_name": "two"}]
    settings = read(tmp_path, ("stages", stages)).settings
    ours = tmp_path / "ours.yaml"
    ours.write_text(_yaml(_plain(settings)))
    assert read_run(ours).settings.model_dump() == settings.model_dump()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("algorithm.optimizer.min_lr_ratio", 0.5, "a constant schedule does not decay"),
        ("explorer.over_rollout.wait_after_min", 5.0, "only with a ratio above 0"),
        ("explorer.dynamic_timeout.warmup_min_steps", 5, "only with enable: true"),
        ("explorer.max_inflight_batches", 5, "only with sync_style fully_async"),
    ],
)
def test_key_without_its_switch_is_noted(tmp_path, key, value, words):
    assert any(key.rpartition(".")[0] in note and words in note for note in read(tmp_path, (key, value)).notes)


def test_unused_of_two_equivalent_keys_is_noted(tmp_path):
    optimizer = "algorithm.optimizer"
    run_file = read(tmp_path, (f"{optimizer}.lr_warmup_steps", 3), (f"{optimizer}.lr_warmup_steps_ratio", 0.5))
    problem = "lr_warmup_steps_ratio: it has an effect only where lr_warmup_steps is -1"
    assert any(problem in note for note in run_file.notes)
    run_file = read(tmp_path, (f"{optimizer}.warmup_style", "cosine"), (f"{optimizer}.lr_scheduler_type", "linear"))
    assert run_file.settings.optimizer.schedule == "cosine"
    assert any("lr_scheduler_type: warmup_style" in note for note in run_file.notes)


def test_keys_with_their_switch_are_translated(tmp_path):
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


DEMONSTRATIONS = "buffer.trainer_input.experience_buffer"
SUPERVISED = (
    ("algorithm.algorithm_type", "sft"),
    ("mode", "train"),
    ("buffer.train_batch_size", 8),
    (f"{DEMONSTRATIONS}.storage_type", "file"),
    (f"{DEMONSTRATIONS}.path", "chats.jsonl"),
)


def test_demonstrations_use_tools_of_the_row(tmp_path):
    run = read(tmp_path, *SUPERVISED).settings
    assert run.demonstrations is not None
    assert run.demonstrations.data.tools_key == "tools"


@pytest.mark.parametrize(
    ("kind", "key"), [("sft", "response_key"), ("sft", "chosen_key"), ("cpt", "messages_key"), ("dpo", "tools_key")]
)
def test_unused_format_key_is_noted(tmp_path, kind, key):
    notes = read(
        tmp_path, *SUPERVISED, ("algorithm.algorithm_type", kind), (f"{DEMONSTRATIONS}.format.{key}", "some")
    ).notes
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
def test_keys_without_effect_are_noted(tmp_path, pairs, words):
    assert any(words in note for note in read(tmp_path, *pairs).notes)
