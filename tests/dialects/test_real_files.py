"""Settings of real files that are translated: shares of a batch, router replay, corrections, keys of scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.minds.test_translate import read as read_minds
from tests.integrations.minds.test_translate import with_lines
from tests.integrations.rllm.files.test_files import TASKS
from tests.integrations.rllm.files.test_files import read as read_rllm
from tests.integrations.trinity.files import read as read_trinity
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files import read_config, translate


def read_own_reference(folder: Path, reference: str) -> object:
    file = folder / "run.yaml"
    file.write_text("model: {name: tiny}\ntasks: {train: {type: addition}}\nrewards: [{type: number}]\n")
    return read_run(file, [f"model.name={reference}"])


def read_trinity_reference(folder: Path, reference: str) -> object:
    read_trinity(folder)
    (file,) = folder.glob("*.y*ml")
    return read_run(file, [f"model.model_path={reference}"])


def read_rllm_reference(folder: Path, reference: str) -> object:
    return read_rllm(folder, *TASKS, f"training.default_local_dir={reference}")


def test_trinity_rounds_demonstrations_up(tmp_path: Path):
    run = read_trinity(
        tmp_path,
        ("algorithm.algorithm_type", "mix"),
        ("algorithm.repeat_times", 8),
        ("algorithm.sample_strategy_args", {"expert_data_ratio": 0.11}),
        ("buffer.train_batch_size", 864),
        ("buffer.batch_size", 96),
        ("buffer.trainer_input.auxiliary_buffers.sft_dataset", {"storage_type": "file", "path": "a.jsonl"}),
    ).settings
    assert run.demonstrations is not None
    assert (run.groups_per_step, run.group_size, run.demonstrations.per_step) == (96, 8, 96)


def test_trinity_router_replay_and_correction(tmp_path: Path):
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_rs": "geometric"}
    correction |= {"rollout_rs_threshold": 1.02, "rollout_rs_threshold_lower": 0.98}
    run = read_trinity(
        tmp_path, ("algorithm.enable_router_replay", True), ("algorithm.rollout_correction", correction)
    ).settings
    ours = run.algorithm.correction
    assert run.model.router_replay == "replay"
    assert (ours.type, ours.level, ours.cap, ours.mask, ours.mask_bounds) == (
        "tis", "sequence", 3.0, "geometric", (0.98, 1.02),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="Did you mean 'rollout_is'"):
        read_trinity(tmp_path, ("algorithm.rollout_correction", {"rolout_is": "token"}))


@pytest.mark.parametrize("sign", ["+", "++"])
def test_keys_of_a_script_are_noted(tmp_path: Path, sign: str):
    run = read_rllm(tmp_path, *TASKS, f"{sign}data.source=x", f"{sign}own=1", f"{sign}training.group_size=2")
    assert run.settings.group_size == 2
    assert any(note.startswith("data.source, own: ") for note in run.notes)
    translation = translate(read_config({}, [f"{sign}agent.tool=x", f"{sign}trainer.device=cpu"]))
    assert {note.partition(":")[0] for note in translation.notes} >= {"agent.tool", "trainer.device"}


def test_max_length_shortens_replies_to_long_prompts(tmp_path: Path):
    sampling = read_rllm(tmp_path, *TASKS, "training.max_length=64").settings.sampling
    assert (sampling.max_prompt_tokens, sampling.max_tokens, sampling.max_total_tokens) == (63, 16, 64)
    assert [sampling.max_reply(prompt) for prompt in (10, 48, 60)] == [16, 16, 4]


def test_distillation_clips_its_advantages(tmp_path: Path):
    teacher = ("algorithm.adv_estimator=distill", "algorithm.teacher_rollout_args.backend=tinker")
    clips = ("+algorithm.clip_advantages=true", "+algorithm.adv_clip_min=-2", "+algorithm.adv_clip_max=3")
    advantage = read_rllm(tmp_path, *TASKS[:1], *teacher, *clips).settings.algorithm.advantage.model_dump()
    assert (advantage["low"], advantage["high"]) == (-2, 3)


def test_minds_group_of_one_trains_on_its_reward(tmp_path: Path):
    run = read_minds(tmp_path, with_lines("trainer", "rollouts_per_example = 1"))
    assert run.settings.group_size == 1
    assert any(note.startswith("trainer.rollouts_per_example: ") for note in run.notes)


def test_trinity_bench_needs_no_adapter(tmp_path: Path):
    evals = [{"name": "e", "storage_type": "file", "path": "a.jsonl", "default_workflow_type": "math_workflow"}]
    changes = ("buffer.explorer_input.eval_tasksets", evals), ("model.tinker", {}), ("model.lora_configs", None)
    assert read_trinity(tmp_path, ("mode", "bench"), *changes).settings.mode == "bench"
    with pytest.raises(ConfigError, match="training all weights"):
        read_trinity(tmp_path, *changes)


def test_trinity_chunks_of_requests_are_noted(tmp_path: Path):
    run = read_trinity(tmp_path, ("model.tinker", {"enable": True, "forward_backward_chunk_bytes": 1_000}))
    assert any(note.startswith("model.tinker.forward_backward_chunk_bytes: ") for note in run.notes)


def test_rllm_decay_and_clipping_are_copied():
    words = ["rllm/backend=tinker", "training.weight_decay=0.01", "training.grad_clip_norm=1.5"]
    translation = translate(read_config({}, [*words, "rllm.trainer.dump_batch_dir=x"]))
    optimizer = translation.settings["optimizer"]
    assert (optimizer["weight_decay"], optimizer["grad_clip_norm"]) == (0.01, 1.5)
    assert any(note.startswith("rllm.trainer.dump_batch_dir: ") for note in translation.notes)


def test_rllm_dppo_is_refused_without_a_suggestion():
    (fault,) = translate(read_config({}, ["rllm/backend=tinker", "rllm.algorithm.loss_fn=dppo_tv"])).faults
    assert "'dppo_tv' is not offered. Known here: " in fault
    assert "Did you mean" not in fault


@pytest.mark.parametrize("read", [read_own_reference, read_trinity_reference, read_rllm_reference])
def test_a_bad_reference_is_blamed_on_its_place(tmp_path: Path, read: Callable[[Path, str], object]):
    with pytest.raises(ConfigError, match=r"^(.* is read as .*\n)?the command line: .*tinsmith_absent"):
        read(tmp_path, "${oc.env:tinsmith_absent}")


def test_references_in_overrides_of_our_keys_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINSMITH_SOME", "out")
    read_trinity(tmp_path)
    (file,) = tmp_path.glob("*.y*ml")
    words = ["folder=${oc.env:TINSMITH_SOME}/a", r"description=\${b}", "steps=${oc.env:TINSMITH_NONE,7}"]
    settings = read_run(file, words).settings
    assert (settings.folder, settings.description, settings.steps) == ("out/a", "${b}", 7)
    with pytest.raises(ConfigError, match=r"the command line: .*tinsmith_absent"):
        read_run(file, ["folder=${oc.env:tinsmith_absent}"])


def test_a_bracketed_stop_is_noted(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 1\nmodel: {name: tiny}\ntasks: {train: {type: addition}}\nrewards: [{type: number}]\n")
    run = read_run(file, ["sampling.stop=[/INST]"])
    assert run.settings.sampling.stop == ("/INST",)
    assert run.notes[0].startswith("sampling.stop: [/INST] is a list of one text")
    assert read_run(file, ["sampling.stop=['[/INST]']"]).settings.sampling.stop == ("[/INST]",)
    for plain in ("['a']", "[a, b]", "[1]", "[<end>]", "</answer>"):
        assert read_run(file, [f"sampling.stop={plain}"]).notes == ()
