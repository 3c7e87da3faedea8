"""Trinity's algorithms by name, with arguments merged over Trinity's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.examples import BESIDE, LEARNS, Pairs
from tests.integrations.trinity.files import read
from tinsmith.errors import ConfigError
from tinsmith.integrations.trinity.files.name_tables import ADVANTAGES, ALGORITHMS, LOSSES
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage, OpmdAdvantage
from tinsmith.rl.algorithms.advantages.multi_turn import GigpoAdvantage, StepWiseGrpoAdvantage
from tinsmith.rl.algorithms.advantages.per_token import JsdAdvantage
from tinsmith.rl.algorithms.config import NAMES, AlgorithmConfig
from tinsmith.rl.algorithms.losses.policy_gradient import CispoLoss, PpoLoss, RecLoss
from tinsmith.rl.algorithms.losses.supervised import MixChordLoss, MixtureLoss
from tinsmith.rl.algorithms.regularizers import KlConfig
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.conversation import Conversation

TEACHER: Pairs = (("explorer.auxiliary_models[].model_path", "teacher"),)
WANTS: dict[str, Pairs] = {
    "mix": BESIDE,
    "mix_chord": BESIDE,
    "sft": LEARNS,
    "cpt": LEARNS,
    "dpo": LEARNS,
    "on_policy_distill": TEACHER,
    "jsd": TEACHER,
}


def algorithm(folder: Path, name: str, **arguments: Any) -> AlgorithmConfig:
    pairs = [(f"algorithm.{key}", value) for key, value in arguments.items()]
    run_file = read(folder, *WANTS.get(name, ()), ("algorithm.algorithm_type", name), *pairs)
    return run_file.settings.algorithm


CHORD = {
    "mu_warmup_steps": 200,
    "mu_decay_steps": 400,
    "mu_peak": 0.5,
    "mu_valley": 0.02,
    "enable_phi_function": True,
    "clip_range": 0.2,
    "use_token_level_loss_in_sft": True,
    "use_dynamic_bsz": True,
    "ppo_mini_batch_size": 320,
    "ppo_micro_batch_size_per_gpu": 4,
    "ngpus_trainer": 4,
    "train_batch_size_expert": 64,
    "train_batch_size_usual": 256,
}
"""Arguments of mix_chord in Trinity's published file."""


def test_mixed_batch_split_arguments_are_ignored(tmp_path: Path):
    pairs = (*BESIDE, ("algorithm.algorithm_type", "mix_chord"), ("algorithm.policy_loss_fn_args", CHORD))
    run_file = read(tmp_path, *pairs)
    loss = run_file.settings.algorithm.loss
    assert isinstance(loss, MixChordLoss)
    assert (loss.warmup_steps, loss.decay_steps, loss.peak, loss.valley, loss.phi) == (200, 400, 0.5, 0.02, True)
    notes = [note for note in run_file.notes if "policy_loss_fn_args" in note]
    assert len(notes) == 2
    assert all(any(name in note for note in notes) for name in list(CHORD)[7:])


def test_every_algorithm_of_trinity_is_known():
    ours_alone = {"grpo_std", "topk_distill", "ipo", "kto", "orpo", "simpo", "bradley_terry"}
    assert set(ALGORITHMS) == {*NAMES} - ours_alone
    assert len(ALGORITHMS) == 24


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_name_selects_our_preset(name: str, tmp_path: Path):
    config = algorithm(tmp_path, name)
    ours = "grpo_std" if name == "grpo" else name
    assert config.type == ours
    if name == "gigpo":  # single turns have no states; tested below
        return
    teacher = {"teacher": "teacher"} if config.teacher else {}
    preset = AlgorithmConfig.model_validate({"type": ours, **teacher})
    assert config.kl == (KlConfig(type="k2", coef=0.001) if name == "dpo" else preset.kl)
    assert config.aggregate == preset.aggregate
    assert type(config.advantage) is type(preset.advantage)
    assert type(config.loss) is type(preset.loss)
    assert (config.critic is None) == (preset.critic is None)


def test_arguments_are_merged_over_defaults(tmp_path: Path):
    config = algorithm(tmp_path, "grpo", policy_loss_fn_args={"clip_range_high": 0.3}, kl_loss_fn_args={})
    assert config.loss == PpoLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert config.kl.coef == 0.001
    two = algorithm(tmp_path, "grpo", policy_loss_fn_args={"clip_range_high": 0.28, "clip_range": 0.1})
    assert two.loss == PpoLoss(clip_low=0.1, clip_high=0.28)


def test_advantage_arguments_are_translated(tmp_path: Path):
    args = {"std_threshold": 0.0, "std_cal_level": "batch", "rank_penalty": 0.25, "duplicate_experiences": True}
    config = algorithm(tmp_path, "dapo", advantage_fn_args=args)
    assert config.advantage == GrpoAdvantage(normalize="batch", std_threshold=0.0, rank_penalty=0.25)
    assert config.refill
    assert algorithm(tmp_path, "asymre", advantage_fn_args={"baseline_shift": -0.3}).advantage == OpmdAdvantage(
        shift=0.3
    )


def test_dpo_keeps_its_divergence(tmp_path: Path):
    dpo = [*LEARNS, ("algorithm.algorithm_type", "dpo")]
    for pairs in ([], [("algorithm.kl_loss_fn", "none")]):
        run_file = read(tmp_path, *dpo, *pairs, ("algorithm.loss_agg_mode", "seq-mean-token-sum"))
        assert run_file.settings.algorithm.kl == KlConfig(type="k2", coef=0.001)
        assert run_file.settings.algorithm.aggregate == "seq_mean_token_sum"
        assert any("dpo always has a divergence" in note for note in run_file.notes) == bool(pairs)
    run_file = read(tmp_path, *dpo, ("algorithm.kl_loss_fn_args", {"kl_coef": 0}), ("algorithm.loss_agg_mode", "x"))
    assert not run_file.settings.algorithm.kl.enabled
    assert any("mean over pairs" in note for note in run_file.notes)


def test_importance_weights_of_a_nucleus_are_recomputed(tmp_path: Path):
    nucleus = ("model.top_p", 0.9)
    sampled = read(tmp_path, ("algorithm.policy_loss_fn", "importance_sampling"), nucleus)
    assert sampled.settings.algorithm.old_logprobs == "recomputed"
    assert any("whole distribution" in note for note in sampled.notes)
    for pairs in ([nucleus], [("algorithm.policy_loss_fn", "importance_sampling")]):
        assert read(tmp_path, *pairs).settings.algorithm.old_logprobs == "auto"


def test_mask_of_cispo_has_trinitys_bounds(tmp_path: Path):
    masked = {"enable_mask_clip": True, "clip_range_high": 0.5}
    loss = algorithm(tmp_path, "cispo", policy_loss_fn_args=masked).loss
    assert loss == CispoLoss(clip_high=0.5, mask=True, mask_low=1.0, mask_high=0.28)
    loss = algorithm(tmp_path, "cispo", policy_loss_fn_args={**masked, "mask_clip_range_high": 0.1}).loss
    assert loss == CispoLoss(clip_high=0.5, mask=True, mask_low=1.0, mask_high=0.1)
    assert algorithm(tmp_path, "cispo", policy_loss_fn_args={"mask_clip_range_high": 0.1}).loss == CispoLoss()


def test_later_arguments_of_trinity_are_known(tmp_path: Path):
    drifting = {"enable_sequence_masking": True, "delta_sequence_masking": 0.3}
    assert algorithm(tmp_path, "grpo", policy_loss_fn_args=drifting).loss == PpoLoss(mask_drift=0.3)
    args = {"temperature": 0.5, "chunk_size": 512}
    assert algorithm(tmp_path, "jsd", advantage_fn_args=args).advantage == JsdAdvantage(temperature=0.5)
    assert algorithm(tmp_path, "grpo", advantage_fn_args={"epsilon": 1e-4}).advantage == GrpoAdvantage(epsilon=1e-4)


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
@pytest.mark.parametrize(
    ("args", "rollouts", "demonstrations"),
    [
        ({}, "token_mean", None),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "seq_mean_token_sum", None),
        ({"sft_loss_agg_mode": "seq-mean-token-mean"}, "token_mean", "seq_mean_token_mean"),
        ({"grpo_loss_agg_mode": "seq-mean-token-mean"}, "seq_mean_token_mean", "token_mean"),
    ],
)
def test_mixed_losses_have_two_aggregates(name: str, args: Any, rollouts: str, demonstrations: str, tmp_path: Path):
    config = algorithm(tmp_path, name, policy_loss_fn_args=args)
    assert isinstance(config.loss, MixtureLoss)
    assert (config.aggregate, config.loss.expert_aggregate) == (rollouts, demonstrations)


def test_differing_defaults_are_written_out(tmp_path: Path):
    assert algorithm(tmp_path, "opmd").loss.model_dump()["tau"] == 1.0
    assert algorithm(tmp_path, "rec").loss == RecLoss(clip="none")
    chord = algorithm(tmp_path, "mix_chord").loss.model_dump()
    assert (chord["warmup_steps"], chord["decay_steps"], chord["peak"]) == (0, 0, 0.1)


async def looking(task: Task, conversation: Conversation) -> None:
    """A workflow whose turns have states."""
    await conversation.say(*task.messages, state="here")


def test_gigpo_without_states_compares_whole_rollouts(tmp_path: Path):
    for fnorm, normalize in (("none", "none"), ("std", "group")):
        pairs = (("algorithm.algorithm_type", "gigpo"), ("algorithm.advantage_fn_args", {"fnorm": fnorm}))
        run_file = read(tmp_path, *pairs)
        assert run_file.settings.algorithm.advantage == StepWiseGrpoAdvantage(normalize=normalize)
        assert any("turns of this workflow have no states" in note for note in run_file.notes)
        workflow = ("buffer.explorer_input.default_workflow_type", f"{__name__}.looking")
        assert read(tmp_path, *pairs, workflow).settings.algorithm.advantage == GigpoAdvantage(
            gamma=1.0, normalize=fnorm == "std"
        )


def test_rec_doubles_the_k2_coefficient(tmp_path: Path):
    config = algorithm(tmp_path, "rec", policy_loss_fn_args={"regularizer": "k2", "regularizer_coef": 0.5})
    assert config.loss == RecLoss(clip="none", regularizer="k2", regularizer_coef=1.0)
    sequence = algorithm(tmp_path, "rec", policy_loss_fn_args={"clip_mode": "gspo-one-side"})
    assert sequence.aggregate == "seq_mean_token_mean"


def test_divergences_and_entropy_are_translated(tmp_path: Path):
    adaptive = {"kl_coef": 0.1, "adaptive": True, "target_kl": 6.0, "horizon": 100}
    config = algorithm(
        tmp_path,
        "rloo",
        kl_loss_fn="low_var_kl",
        kl_penalty_fn="k1",
        kl_penalty_fn_args=adaptive,
        entropy_loss_fn_args={"entropy_coef": 0.02},
        loss_agg_mode="seq-mean-token-sum-norm",
    )
    assert (config.kl.type, config.kl.coef, config.entropy.coef) == ("low_var_kl", 0.001, 0.02)
    assert (config.kl_penalty.coef, config.kl_penalty.target, config.kl_penalty.horizon) == (0.1, 6.0, 100)
    assert config.aggregate == "seq_mean_token_sum_norm"


def test_group_size_may_be_one_and_defaults_as_documented(tmp_path: Path):
    assert read(tmp_path, ("algorithm.repeat_times", 1)).settings.group_size == 1
    unset = read(tmp_path, ("algorithm", {"algorithm_type": "gigpo"}))
    assert unset.settings.group_size == 8
    assert any("algorithm.repeat_times is not set: 8" in note for note in unset.notes)


def test_warmup_by_steps_overrides_ratio(tmp_path: Path):
    steps = read(tmp_path, ("algorithm.optimizer", {"lr_warmup_steps": 2, "lr_warmup_steps_ratio": 0.5})).settings
    assert (steps.optimizer.warmup_steps, steps.optimizer.warmup_ratio) == (2, 0.0)
    share = read(tmp_path, ("algorithm.optimizer", {"lr_warmup_steps_ratio": 0.5})).settings
    assert (share.optimizer.warmup_steps, share.optimizer.warmup_ratio) == (0, 0.5)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("algorithm_type", "grop", "Did you mean 'grpo'?"),
        ("advantage_fn", "remax", "Use rloo"),
        ("advantage_fn", "gpro", "Did you mean 'grpo'?"),
        ("advantage_fn_args", {"std_treshold": 0.1}, "Did you mean 'std_threshold'?"),
        ("policy_loss_fn_args", {"delta": 0.1}, "there is no such argument"),
        ("advantage_fn_args", {"std_cal_level": "world"}, "It is one of group, batch."),
        ("policy_loss_fn", "pppo", "Did you mean 'ppo'?"),
        ("policy_loss_fn_args", {"clip_rang": 0.1}, "Did you mean 'clip_range'?"),
        ("kl_loss_fn", "k4", "there is no 'k4'"),
        ("kl_loss_fn_args", {"coef": 0.1}, "Did you mean 'kl_coef'?"),
        ("kl_loss_fn_args", {"kl_coef": 0.1, "adaptive": True}, "Set target_kl and horizon as well"),
        ("entropy_loss_fn", "some", "Known here: default, mix, none."),
        ("entropy_loss_fn_args", {"entropy_coeff": 0.1}, "Did you mean 'entropy_coef'?"),
        ("loss_agg_mode", "token-sum", "It is one of token-mean"),
        ("repeat_times", 0, "Set 1 or more."),
        ("optimizer", {"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'?"),
        ("sample_strategy", "mixx", "there is no 'mixx'"),
    ],
)
def test_unknown_names_are_refused(key: str, value: Any, says: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, (f"algorithm.{key}", value))
    assert f"'algorithm.{key}" in str(refusal.value)
    assert says in str(refusal.value)


def test_two_aggregation_modes_are_refused(tmp_path: Path):
    args = {"loss_agg_mode": "token-mean"}
    with pytest.raises(ConfigError, match="Set it once"):
        algorithm(tmp_path, "grpo", policy_loss_fn_args=args, loss_agg_mode="seq-mean-token-sum")


@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"ppo", "on_policy_distill", "jsd", "gigpo"}))
def test_grpo_accepts_every_critic_free_advantage(name: str, tmp_path: Path):
    assert algorithm(tmp_path, "grpo", advantage_fn=name).advantage.type == ADVANTAGES[name].type


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"mix", "mix_chord", "dpo", "sft"}))
def test_grpo_accepts_every_policy_loss(name: str, tmp_path: Path):
    assert algorithm(tmp_path, "grpo", policy_loss_fn=name).loss.type == LOSSES[name].type
