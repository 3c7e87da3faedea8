"""Trinity's names of advantages, policy losses and divergences, with their arguments, as parts of ours.

A part's own arguments lie over Trinity's defaults; what ours has no place for is refused by name. Leaves out how an
`algorithm` section becomes one (`algorithm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.dialects.base import NoMeaning
from tinsmith.dialects.trinity.arguments import Argument, Only, Part, To


def _to(*names: str) -> To:
    return To(names)


_LEVEL = To(("normalize",), {"group": "group", "batch": "batch"})
_EPSILON = {"epsilon": Only(1e-6)}
_CLIPS = {
    "clip_range": _to("clip_low", "clip_high"),
    "clip_range_low": _to("clip_low"),
    "clip_range_high": _to("clip_high"),
}
_CEILING = {"clip_ratio_c": _to("dual_clip")}
_PPO = {
    **_CLIPS,
    **_CEILING,
    "fallback_to_policy_gradient": _to("on_policy"),
    "enable_sequence_masking": To(("mask_drift",), {True: 0.1, False: None}),
    "delta": To(("mask_drift",), where="enable_sequence_masking"),
}
_CUT = NoMeaning("weights are those of the whole batch, however it is cut for the server.")
_SHARES = NoMeaning("algorithm.sample_strategy_args.expert_data_ratio says how many are whose.")
_BATCHES = {
    **dict.fromkeys(("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"), _CUT),
    **dict.fromkeys(("train_batch_size_usual", "train_batch_size_expert"), _SHARES),
}
_TOKENS = Only(True, "Leave it out; algorithm.loss_agg_mode says how tokens add up.")

ADVANTAGES: Mapping[str, Part] = {
    "ppo": Part("gae", {"gamma": _to("gamma"), "lam": _to("lam")}),
    "grpo": Part(
        "grpo",
        {
            **_EPSILON,
            "std_threshold": _to("std_threshold"),
            "rank_penalty": _to("rank_penalty"),
            "std_cal_level": _LEVEL,
            "duplicate_experiences": _to("^refill"),
        },
    ),
    "step_wise_grpo": Part(
        "step_wise_grpo",
        {
            **_EPSILON,
            "std_threshold": _to("std_threshold"),
            "std_cal_level": _LEVEL,
            "enable_step_norm": _to("by_turns"),
        },
    ),
    "gigpo": Part(
        "gigpo",
        {
            **_EPSILON,
            "gamma": _to("gamma"),
            "omega": _to("omega"),
            "fnorm": To(("normalize",), {"none": False, "std": True}),
            "step_reward_key": Only("step_reward", "Workflows tell rewards of turns as Turn.reward."),
            "env_state_hash_key": Only("env_state_hash", "Workflows tell states of turns as Turn.state."),
        },
        {"gamma": 1.0},
    ),
    "opmd": Part("opmd", {"opmd_baseline": _to("baseline"), "tau": _to("tau")}),
    "asymre": Part("opmd", {"baseline_shift": To(("shift",), by=lambda shift: -float(shift))}, {"shift": 0.1}),
    "reinforce": Part("reinforce"),
    "rec": Part(
        "rec",
        {**_EPSILON, "std_normalize": _to("normalize"), "drop": To(("drop",), {"balance": "balance", None: "none"})},
    ),
    "rloo": Part("rloo"),
    "reinforceplusplus": Part("reinforceplusplus", {"gamma": _to("gamma")}),
    "on_policy_distill": Part("on_policy_distill", {"kl_coef": _to("coef")}),
    "jsd": Part("jsd", {"kl_coef": _to("coef"), "lambda_coef": _to("beta")}),
    "clipb": Part("clipb", {**_EPSILON, "mu": _to("mu")}),
}

MISSING_ADVANTAGES = {
    "remax": "Use rloo: it has the others' rewards for a baseline, and samples no greedy reply.",
    "clipv": "Use clipb, which leaves out the same tokens by their entropy.",
}

LOSSES: Mapping[str, Part] = {
    "ppo": Part("ppo", _PPO),
    "importance_sampling": Part("importance_sampling"),
    "opmd": Part("opmd", {"tau": _to("tau")}, {"tau": 1.0}),
    "sft": Part("sft", {"use_token_level_loss": _TOKENS}),
    "sft_is": Part("sft_is", {"use_token_level_loss": _TOKENS}),
    "sft_phi": Part("sft_phi", {"use_token_level_loss": _TOKENS, "cutoff_prob": Only(1.0)}),
    "dpo": Part("dpo", {"beta": _to("beta"), "label_smoothing": _to("label_smoothing")}),
    "cispo": Part(
        "cispo",
        {
            "clip_range_low": _to("clip_low"),
            "clip_range_high": _to("clip_high"),
            "enable_mask_clip": _to("mask"),
            "mask_clip_range_low": Only(1.0, "The mask's bounds are clip_range_low and clip_range_high."),
            "mask_clip_range_high": Only(0.28, "The mask's bounds are clip_range_low and clip_range_high."),
        },
    ),
    "gspo": Part("gspo", _CLIPS),
    "topr": Part("topr", {"advantage_threshold": _to("threshold")}),
    "sapo": Part("sapo", {"tau_pos": _to("tau_positive"), "tau_neg": _to("tau_negative")}),
    "sppo": Part("sppo", {"epsilon": _to("epsilon")}),
    "rec": Part(
        "rec",
        {
            "epsilon_low": _to("clip_low"),
            "epsilon_high": _to("clip_high"),
            "epsilon_low_prime": _to("ring_low"),
            "epsilon_high_prime": _to("ring_high"),
            "clip_mode": To(
                ("clip",),
                {
                    "none": "none",
                    "one-side": "one_side",
                    "two-side": "two_side",
                    "ring": "ring",
                    "gspo-one-side": "gspo_one_side",
                },
            ),
            "weight": To(
                ("weight",),
                {one: one for one in ("none", "importance_sampling", "gspo_importance_sampling", "advantage")},
            ),
            "regularizer": To(("regularizer",), {"none": "none", "k2": "k2", "forward-kl": "forward_kl"}),
            "regularizer_coef": _to("regularizer_coef"),
            "temp": _to("temperature"),
        },
        {"clip": "none"},
    ),
    "mix": Part("mix", {"mu": _to("mu"), **_CLIPS, **_BATCHES, "use_token_level_loss_in_sft": _TOKENS}),
    "mix_chord": Part(
        "mix_chord",
        {
            "mu_warmup_steps": _to("warmup_steps"),
            "mu_decay_steps": _to("decay_steps"),
            "mu_peak": _to("peak"),
            "mu_valley": _to("valley"),
            "enable_phi_function": _to("phi"),
            **_CLIPS,
            **_BATCHES,
            "use_token_level_loss_in_sft": _TOKENS,
        },
        {"warmup_steps": 0, "decay_steps": 0},
    ),
}

DIVERGENCES = ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
AGGREGATES = {
    one.replace("_", "-"): one
    for one in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
}
ENTROPIES = ("default", "mix", "none")

PARTS: Mapping[str, tuple[str, str]] = {
    "ppo": ("ppo", "ppo"),
    "grpo": ("grpo", "ppo"),
    "grpo_verl": ("grpo", "ppo"),
    "dapo": ("grpo", "ppo"),
    "reinforceplusplus": ("reinforceplusplus", "ppo"),
    "rloo": ("rloo", "ppo"),
    "opmd": ("opmd", "opmd"),
    "asymre": ("asymre", "opmd"),
    "dpo": ("", "dpo"),
    "topr": ("reinforce", "topr"),
    "cispo": ("grpo", "cispo"),
    "gspo": ("grpo", "gspo"),
    "sapo": ("grpo", "sapo"),
    "mix": ("grpo", "mix"),
    "mix_chord": ("grpo", "mix_chord"),
    "raft": ("", ""),
    "sppo": ("opmd", "sppo"),
    "rec": ("rec", "rec"),
    "multi_step_grpo": ("step_wise_grpo", "ppo"),
    "gigpo": ("gigpo", "ppo"),
    "on_policy_distill": ("on_policy_distill", "ppo"),
    "jsd": ("jsd", "ppo"),
    "sft": ("", "sft"),
    "cpt": ("", "sft"),
}
"""Each algorithm's advantage and policy loss by Trinity's names; empty where ours has no arguments of Trinity's."""

REPEATS = {
    "ppo": 1, "dapo": 16, "mix": 8, "mix_chord": 8, "multi_step_grpo": 8, "gigpo": 8, "on_policy_distill": 8, "jsd": 8,
    "raft": 8, "sft": 1, "cpt": 1, "dpo": 1,
}  # fmt: skip
"""Documented group sizes; 2 for all others. RAFT's is none, and the best of one reply is that reply: 8 here."""


THINK_BOXED = (
    "First think the problem through between <think> and </think>. Then write the solution, with the final answer in "
    "\\boxed{}."
)
_BOXED = {"system": "Work the problem out step by step, and put the final answer in \\boxed{}."}


@dataclass(frozen=True, slots=True)
class Work:
    """A workflow as one of ours, and what judges its replies where a file names nothing."""

    part: Part
    """Arguments named ^NAME go to the reward."""
    reward: str = ""
    rubric: str = ""
    """With a judge: the field of a row that holds its rubric."""
    extra: tuple[str, ...] = ()
    """Fields of a row that it reads beside question and answer."""


JUDGE = "(judge)"
"""In place of a reward's name: the first of explorer.auxiliary_models."""

_PLAIN, _MATH = Part("single_turn"), Part("math")
_THINK: Mapping[str, Argument] = {
    "with_think": To(("^think",)),
    "format_score_coef": To(("^form",)),
    "use_base": Only(False, "Prompts go through the chat template: set model.custom_chat_template to '{{ … }}'."),
}

WORKFLOWS: Mapping[str, Work] = {
    "simple_workflow": Work(_PLAIN),
    "math_workflow": Work(_MATH, "math_reward"),
    "math_boxed_workflow": Work(Part("single_turn", _THINK, _BOXED), "math_boxed_reward"),
    "math_eval_workflow": Work(Part("single_turn", settings=_BOXED), "math_boxed_reward"),
    "math_rm_workflow": Work(_MATH, JUDGE),
    "rubric_judge_workflow": Work(_PLAIN, JUDGE, rubric="rubric", extra=("rubric",)),
    "on_policy_distill_workflow": Work(_PLAIN),
    "on_policy_distill_math_workflow": Work(_MATH, "math_reward"),
}
"""Also by these names with async_ before them: here all are."""


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    words: tuple[str, ...]
    cure: str


_WRITTEN = "and name it as FILE.NAME, with --plugin-dir: docs/guides/trinity.md#code-of-your-own."
_ELSEWHERE = (
    _Elsewhere(
        ("agentscope", "as_react", "react", "search", "tool_call"),
        f"Write the agent as an async function of (task, client, model), {_WRITTEN}",
    ),
    _Elsewhere(
        ("alfworld", "frozen_lake", "sciworld", "webshop", "intercode", "sudoku"),
        f"Write the world as a class derived from Environment, {_WRITTEN}",
    ),
    _Elsewhere(
        ("ruler",), "Judges that rank a whole group are not here; use rubric_judge_workflow or math_rm_workflow."
    ),
    _Elsewhere(
        ("rubric_judge_openai",),
        "Use rubric_judge_workflow, with external_model_config.enable in the first of explorer.auxiliary_models.",
    ),
    _Elsewhere(("_mm_",), "Models with images are not served."),
)


def elsewhere(name: str) -> str | None:
    """The cure for a workflow of Trinity's that is not here; None for a name that is not Trinity's either."""
    return next((one.cure for one in _ELSEWHERE if any(word in name for word in one.words)), None)


REWARDS: Mapping[str, Part] = {
    "math_reward": Part("math"),
    "math_boxed_reward": Part("math_boxed", {"with_think": To(("think",)), "format_score_coef": To(("form",))}),
    "format_reward": Part("format", {"pattern": To(("pattern",))}, {"right": 0.1, "wrong": -0.1}),
    "accuracy_reward": Part("math_verify"),
    "countdown_reward": Part("countdown"),
    "math_dapo_reward": Part(
        "math_boxed",
        {
            "enable_overlong_penalty": To(("^overlong",)),
            "max_response_length": To(("^max_tokens",)),
            "cache_length": To(("^margin",)),
            "penalty_factor": To(("^weight",)),
        },
    ),
}
"""What is named ^NAME belongs to the penalty for length, a reward of its own."""

READING = frozenset(REWARDS) - {"format_reward"}
"""Rewards that compare with an answer, which every row must have then."""
