"""Trinity's names of advantages, policy losses, divergences, workflows and rewards, as components of ours.

Trinity's defaults are written out where they differ from ours. `algorithm` and `workflows` use these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.dialects.base import Ignored
from tinsmith.integrations.trinity.files.arguments import Argument, Component, FixedArgument, RenamedArgument
from tinsmith.integrations.trinity.files.prompts import BOXED, R1


def _renamed(*names: str) -> RenamedArgument:
    return RenamedArgument(names)


_NORMALIZE_LEVEL = RenamedArgument(("normalize",), {"group": "group", "batch": "batch"})
_EPSILON: Mapping[str, Argument] = {"epsilon": FixedArgument(1e-6)}
_GRPO_EPSILON: Mapping[str, Argument] = {"epsilon": _renamed("epsilon")}
_CLIPS = {
    "clip_range": _renamed("clip_low", "clip_high"),
    "clip_range_low": _renamed("clip_low"),
    "clip_range_high": _renamed("clip_high"),
}
_DUAL_CLIP = {"clip_ratio_c": _renamed("dual_clip")}
_PPO = {
    **_CLIPS,
    **_DUAL_CLIP,
    "fallback_to_policy_gradient": _renamed("on_policy"),
    "enable_sequence_masking": RenamedArgument(("mask_drift",), {True: 0.1, False: None}),
    "delta_sequence_masking": RenamedArgument(("mask_drift",), only_with="enable_sequence_masking"),
}
_BATCH_SPLIT = Ignored("the loss is normalised over the whole batch, however the server splits it.")
_BATCH_SHARES = Ignored("algorithm.sample_strategy_args.expert_data_ratio sets the shares.")
_BATCHES = {
    **dict.fromkeys(
        ("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"), _BATCH_SPLIT
    ),
    **dict.fromkeys(("train_batch_size_usual", "train_batch_size_expert"), _BATCH_SHARES),
}
MIXED_AGGREGATES = ("sft_loss_agg_mode", "grpo_loss_agg_mode")
"""Translated with loss_agg_mode, which they override for demonstrations and for rollouts."""
_TOKEN_LEVEL = FixedArgument(True, "Leave it out; algorithm.loss_agg_mode sets how token losses are aggregated.")

_OPMD = Component("opmd", {"opmd_baseline": _renamed("baseline"), "tau": _renamed("tau")})
_ASYMRE = Component(
    "opmd", {"baseline_shift": RenamedArgument(("shift",), convert=lambda shift: -float(shift))}, {"shift": 0.1}
)

ADVANTAGES: Mapping[str, Component] = {
    "ppo": Component("gae", {"gamma": _renamed("gamma"), "lam": _renamed("lam")}),
    "grpo": Component(
        "grpo",
        {
            **_GRPO_EPSILON,
            "std_threshold": _renamed("std_threshold"),
            "rank_penalty": _renamed("rank_penalty"),
            "std_cal_level": _NORMALIZE_LEVEL,
            "duplicate_experiences": _renamed("^refill"),
        },
    ),
    "grpo_verl": Component("grpo", _GRPO_EPSILON),
    "step_wise_grpo": Component(
        "step_wise_grpo",
        {
            **_GRPO_EPSILON,
            "std_threshold": _renamed("std_threshold"),
            "std_cal_level": _NORMALIZE_LEVEL,
            "enable_step_norm": _renamed("by_turns"),
        },
    ),
    "gigpo": Component(
        "gigpo",
        {
            **_EPSILON,
            "gamma": _renamed("gamma"),
            "omega": _renamed("omega"),
            "fnorm": RenamedArgument(("normalize",), {"none": False, "std": True}),
            "step_reward_key": FixedArgument("step_reward", "Workflows set the reward of a turn as Turn.reward."),
            "env_state_hash_key": FixedArgument("env_state_hash", "Workflows set the state of a turn as Turn.state."),
        },
        {"gamma": 1.0},
    ),
    "opmd": _OPMD,
    "opmd_verl": _OPMD,
    "asymre": _ASYMRE,
    "asymre_verl": _ASYMRE,
    "reinforce": Component("reinforce"),
    "rec": Component(
        "rec",
        {
            **_EPSILON,
            "std_normalize": _renamed("normalize"),
            "drop": RenamedArgument(("drop",), {"balance": "balance", None: "none"}),
        },
    ),
    "rloo": Component("rloo"),
    "reinforceplusplus": Component("reinforceplusplus", {"gamma": _renamed("gamma")}),
    "on_policy_distill": Component("on_policy_distill", {"kl_coef": _renamed("coef")}),
    "jsd": Component(
        "jsd",
        {
            "kl_coef": _renamed("coef"),
            "lambda_coef": _renamed("beta"),
            "temperature": _renamed("temperature"),
            "chunk_size": Ignored("it saves memory on a GPU; the result is the same without it."),
        },
    ),
    "clipb": Component("clipb", {**_EPSILON, "mu": _renamed("mu")}),
}

MISSING_ADVANTAGES = {
    "remax": "Use rloo: its baseline is the mean reward of the other replies, without a greedy sample.",
    "clipv": "Use clipb, which masks the same tokens by their entropy.",
}

LOSSES: Mapping[str, Component] = {
    "ppo": Component("ppo", _PPO),
    "importance_sampling": Component("importance_sampling"),
    "opmd": Component("opmd", {"tau": _renamed("tau")}, {"tau": 1.0}),
    "sft": Component("sft", {"use_token_level_loss": _TOKEN_LEVEL}),
    "sft_is": Component("sft_is", {"use_token_level_loss": _TOKEN_LEVEL}),
    "sft_phi": Component("sft_phi", {"use_token_level_loss": _TOKEN_LEVEL, "cutoff_prob": FixedArgument(1.0)}),
    "dpo": Component("dpo", {"beta": _renamed("beta"), "label_smoothing": _renamed("label_smoothing")}),
    "cispo": Component(
        "cispo",
        {
            "clip_range_low": _renamed("clip_low"),
            "clip_range_high": _renamed("clip_high"),
            "enable_mask_clip": _renamed("mask"),
            "mask_clip_range_low": RenamedArgument(("mask_low",), only_with="enable_mask_clip"),
            "mask_clip_range_high": RenamedArgument(("mask_high",), only_with="enable_mask_clip"),
        },
    ),
    "gspo": Component("gspo", _CLIPS),
    "topr": Component("topr", {"advantage_threshold": _renamed("threshold")}),
    "sapo": Component("sapo", {"tau_pos": _renamed("tau_positive"), "tau_neg": _renamed("tau_negative")}),
    "sppo": Component("sppo", {"epsilon": _renamed("epsilon")}),
    "rec": Component(
        "rec",
        {
            "epsilon_low": _renamed("clip_low"),
            "epsilon_high": _renamed("clip_high"),
            "epsilon_low_prime": _renamed("ring_low"),
            "epsilon_high_prime": _renamed("ring_high"),
            "clip_mode": RenamedArgument(
                ("clip",),
                {
                    "none": "none",
                    "one-side": "one_side",
                    "two-side": "two_side",
                    "ring": "ring",
                    "gspo-one-side": "gspo_one_side",
                },
            ),
            "weight": RenamedArgument(
                ("weight",),
                {name: name for name in ("none", "importance_sampling", "gspo_importance_sampling", "advantage")},
            ),
            "regularizer": RenamedArgument(("regularizer",), {"none": "none", "k2": "k2", "forward-kl": "forward_kl"}),
            "regularizer_coef": _renamed("regularizer_coef"),
            "temp": _renamed("temperature"),
        },
        {"clip": "none"},
    ),
    "mix": Component("mix", {"mu": _renamed("mu"), **_CLIPS, **_BATCHES, "use_token_level_loss_in_sft": _TOKEN_LEVEL}),
    "mix_chord": Component(
        "mix_chord",
        {
            "mu_warmup_steps": _renamed("warmup_steps"),
            "mu_decay_steps": _renamed("decay_steps"),
            "mu_peak": _renamed("peak"),
            "mu_valley": _renamed("valley"),
            "enable_phi_function": _renamed("phi"),
            **_CLIPS,
            **_BATCHES,
            "use_token_level_loss_in_sft": _TOKEN_LEVEL,
        },
        {"warmup_steps": 0, "decay_steps": 0},
    ),
}

DIVERGENCES = ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
AGGREGATES = {
    name.replace("_", "-"): name
    for name in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
}
ENTROPIES = ("default", "mix", "none")

ALGORITHMS: Mapping[str, tuple[str, str]] = {
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
"""Algorithm -> its default advantage and policy loss, by Trinity's names; empty where it has no arguments here."""

SUPERVISED = ("sft", "cpt", "dpo")
"""Algorithms that train on demonstrations only, without rollouts."""
MIXED = ("mix", "mix_chord")
"""Algorithms that train on demonstrations and rollouts together."""
DISTILLING = ("on_policy_distill", "jsd")
"""Advantages that compare with a teacher, so that no reward is needed."""

DEFAULT_GROUP_SIZES = {
    "ppo": 1, "dapo": 16, "mix": 8, "mix_chord": 8, "multi_step_grpo": 8, "gigpo": 8, "on_policy_distill": 8, "jsd": 8,
    "raft": 8, "sft": 1, "cpt": 1, "dpo": 1,
}  # fmt: skip
"""Documented group sizes; 2 for all others. RAFT documents none, and keeps the best of a group: 8 here."""


@dataclass(frozen=True, slots=True)
class WorkflowName:
    """A workflow of Trinity as one of ours, with its default reward."""

    component: Component
    """Its companion (arguments named ^NAME) is the reward."""
    reward: str = ""
    rubric: str = ""
    """For a judge: the field of a row that holds the rubric."""
    extra: tuple[str, ...] = ()
    """Fields of a row it reads in addition to question and answer."""


JUDGE = "(judge)"
"""Stands for a reward: the first entry of explorer.auxiliary_models judges the replies."""

PLAIN = Component("single_turn")
_MATH = Component("math", settings={"system": R1})
_THINK: Mapping[str, Argument] = {
    "with_think": _renamed("^think"),
    "format_score_coef": _renamed("^form"),
    "use_base": FixedArgument(
        False, "Prompts go through the chat template: set model.custom_chat_template to '{{ … }}'."
    ),
}

WORKFLOWS: Mapping[str, WorkflowName] = {
    "simple_workflow": WorkflowName(PLAIN),
    "simple_mm_workflow": WorkflowName(PLAIN),
    "math_workflow": WorkflowName(_MATH, "math_reward"),
    "math_boxed_workflow": WorkflowName(Component("single_turn", _THINK, {"system": BOXED}), "math_boxed_reward"),
    "math_eval_workflow": WorkflowName(Component("single_turn", settings={"system": BOXED}), "math_boxed_reward"),
    "math_rm_workflow": WorkflowName(PLAIN, JUDGE),
    "rubric_judge_workflow": WorkflowName(PLAIN, JUDGE, rubric="rubric", extra=("rubric",)),
    "on_policy_distill_workflow": WorkflowName(PLAIN),
    "on_policy_distill_math_workflow": WorkflowName(Component("math"), "math_reward"),
}
"""Trinity also has them with the prefix async_; here every workflow is asynchronous."""


@dataclass(frozen=True, slots=True)
class _UnsupportedWorkflows:
    """Name fragments of workflows that are not supported, and what to use instead."""

    fragments: tuple[str, ...]
    fix: str


_OWN_CODE = "and name it as FILE.NAME, with --plugin-dir: docs/from/trinity.md#code-of-your-own."
_UNSUPPORTED_WORKFLOWS = (
    _UnsupportedWorkflows(
        ("agentscope", "as_react", "react", "search", "tool_call"),
        f"Write the agent as an async function of (task, client, model), {_OWN_CODE}",
    ),
    _UnsupportedWorkflows(
        ("alfworld", "frozen_lake", "sciworld", "webshop", "intercode", "sudoku"),
        f"Write the environment as a class derived from Environment, {_OWN_CODE}",
    ),
    _UnsupportedWorkflows(
        ("ruler",), "Judges that rank a whole group are not supported; use rubric_judge_workflow or math_rm_workflow."
    ),
    _UnsupportedWorkflows(
        ("rubric_judge_openai",),
        "Use rubric_judge_workflow, and set external_model_config.enable in the first of explorer.auxiliary_models.",
    ),
    _UnsupportedWorkflows(("_mm_",), "Use simple_mm_workflow, with format.image_key."),
)


def unsupported_workflow(name: str) -> str | None:
    """The fix for a workflow of Trinity that is not supported; None for a name that is not Trinity's."""
    for unsupported in _UNSUPPORTED_WORKFLOWS:
        if any(fragment in name for fragment in unsupported.fragments):
            return unsupported.fix
    return None


REWARDS: Mapping[str, Component] = {
    "math_reward": Component("math"),
    "math_boxed_reward": Component(
        "math_boxed", {"with_think": _renamed("think"), "format_score_coef": _renamed("form")}
    ),
    "format_reward": Component("format", {"pattern": _renamed("pattern")}, {"right": 0.1, "wrong": -0.1}),
    "accuracy_reward": Component("math_verify"),
    "countdown_reward": Component("countdown"),
    "math_dapo_reward": Component(
        "math_boxed",
        {
            "enable_overlong_penalty": _renamed("^overlong"),
            "max_response_length": _renamed("^max_tokens"),
            "cache_length": _renamed("^margin"),
            "penalty_factor": _renamed("^weight"),
        },
    ),
}
"""The companion (arguments named ^NAME) is the length penalty, a reward of its own."""

NEED_ANSWER = frozenset(REWARDS) - {"format_reward"}
"""Rewards that compare with the reference answer, so that every row must have one."""
