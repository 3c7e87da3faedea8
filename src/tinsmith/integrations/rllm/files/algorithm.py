"""rLLM's estimators and losses: `algorithm`.

On Tinker, rLLM sends no options of a loss and drops the divergence, the aggregate and the correction of its keys; here
each has its effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, combine, did_you_mean, fault, note, settings, translates
from tinsmith.integrations.rllm.files.schema import RllmAlgorithm, RllmTeacher
from tinsmith.integrations.rllm.files.schema_unified import (
    RllmSettings,
    RolloutCorrection,
    StepwiseAdvantage,
    UnifiedAgent,
    UnifiedAlgorithm,
)
from tinsmith.integrations.rllm.files.values import (
    CLIP_MAX,
    CLIP_MIN,
    CLIPS,
    ESTIMATOR,
    GAMMA,
    GROUP_SIZE,
    LAM,
    NORMALIZE,
    Setting,
    Values,
    no_effect,
)

Part = Mapping[str, Any]

ESTIMATORS: Mapping[str, Part] = {
    "grpo": {"type": "grpo", "normalize": "none", "std_threshold": None},
    "reinforce": {"type": "reinforce"},
    "reinforce_plus_plus": {"type": "reinforceplusplus"},
    "reinforce_plus_plus_baseline": {"type": "reinforce_plus_plus_baseline"},
    "rloo": {"type": "rloo"},
    "prpo": {"type": "prpo"},
    "gae": {"type": "gae"},
    "distill": {"type": "on_policy_distill"},
}
"""Estimator -> settings of an advantage."""
PRESETS = {
    "rloo": "rloo",
    "gae": "ppo",
    "reinforce_plus_plus": "reinforceplusplus",
    "distill": "on_policy_distill",
}
"""Estimator -> algorithm.type, which names the run's algorithm; all its parts are set."""
_MISSING = {"echo": "tokens of the environment are not trained on. Use grpo."}

LOSSES: Mapping[str, Part] = {
    "importance_sampling": {"type": "importance_sampling"},
    "ppo": {"type": "ppo", "dual_clip": None},
    "cispo": {"type": "cispo"},
    "gspo": {"type": "gspo"},
    "dro": {"type": "dro"},
    "cross_entropy": {"type": "opmd"},
}
"""loss_fn -> settings of a loss; cross_entropy with the advantages as weights is opmd."""
_CLIPPED = ("ppo", "cispo", "gspo")

AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
GROUPINGS = {"trajectory": "role", "step": "turn", "episode": "rollout"}


def translate(values: Values, estimators: Mapping[str, Part]) -> Translation:
    """`algorithm`. `estimators` are those that a script registers: their names, and settings of an advantage."""
    return (
        settings({"algorithm.type": PRESETS.get(str(values.value(*ESTIMATOR)).lower(), "grpo")})
        + _advantage(values, estimators)
        + _grouping(values)
        + _loss(values)
        + _aggregate(values)
        + _divergence(values)
        + _correction(values)
        + _truncated(values)
        + _router_replay(values)
    )


@translates(
    RllmAlgorithm,
    adv_estimator="algorithm.advantage; also gae and reinforce_plus_plus; an unknown name is an error, not grpo",
    norm_adv_by_std_in_grpo="algorithm.advantage: normalize, with std: population",
)
@translates(
    UnifiedAlgorithm,
    adv_estimator="algorithm.advantage; also gae and reinforce_plus_plus, and names that a script registers",
    norm_adv_by_std_in_grpo="algorithm.advantage: normalize, with std: population",
    use_precomputed_advantage="algorithm.advantage: precomputed",
)
def _advantage(values: Values, estimators: Mapping[str, Part]) -> Translation:
    estimator = values.setting(*ESTIMATOR)
    precomputed = values.has("rllm.algorithm") and values.value("rllm.algorithm.use_precomputed_advantage")
    if precomputed:
        result = settings({"algorithm.advantage": {"type": "precomputed"}})
        unused = values.set_keys(*ESTIMATOR, *NORMALIZE)
        return result + no_effect(unused, "use_precomputed_advantage is true, so the workflow gives the advantages.")
    part, result = advantage(values, str(estimator.value), estimator.key, estimators)
    name = str(estimator.value).lower()
    if part and name != "grpo":
        unused = values.set_keys(*NORMALIZE) if values.value(*NORMALIZE) else []
        result += no_effect(unused, f"only grpo divides by the standard deviation of a group, not {name}.")
    if part and name not in ("gae", "reinforce_plus_plus"):
        discounts = values.value("algorithm.grouping_level") == "step"
        unused = values.set_keys(*(() if discounts else GAMMA), *LAM)
        result += no_effect(unused, f"{name} does not discount; gae and reinforce_plus_plus do.")
    if part and name == "grpo" and values.value(*GROUP_SIZE) == 1:
        key = values.setting(*GROUP_SIZE).key
        result += note(f"{key}: a role with one trajectory in a group has no baseline; its advantage is its reward.")
    return result + (settings({"algorithm.advantage": part}) if part else NOTHING) + _teacher(values, name)


@translates(
    RllmAlgorithm,
    gamma="algorithm.advantage.gamma, with gae, reinforce_plus_plus; algorithm.turn_discount, with grouping_level step",
    lam="algorithm.advantage.lam, with gae",
)
@translates(
    UnifiedAlgorithm,
    gamma="algorithm.advantage.gamma, with gae, reinforce_plus_plus; null is algorithm.gamma",
    lam="algorithm.advantage.lam, with gae; null is algorithm.lam",
)
def advantage(
    values: Values, name: str, key: str, estimators: Mapping[str, Part]
) -> tuple[dict[str, Any], Translation]:
    """Settings of the advantage of the estimator `name`, empty with a fault at `key` if there is no such one."""
    if name in estimators:
        return dict(estimators[name]), NOTHING
    name = name.lower()
    if name in _MISSING:
        return {}, fault(key, f"'{name}' is not supported:", _MISSING[name])
    if name not in ESTIMATORS:
        fix = f"{did_you_mean(name, [*ESTIMATORS, *estimators])} rLLM registers others in Python."
        return {}, fault(key, f"there is no estimator '{name}'.", fix)
    part, result = dict(ESTIMATORS[name]), NOTHING
    if name == "grpo" and values.value(*NORMALIZE):
        part |= {"normalize": "group", "std": "population"}
    if name in ("gae", "reinforce_plus_plus"):
        part["gamma"] = _discount(values, *GAMMA)
    if name == "distill":
        result += _clipping(values, part)
    elif clips := values.set_keys(*CLIPS, *CLIP_MIN, *CLIP_MAX):
        result += no_effect(clips, "it has an effect only with adv_estimator distill.")
    if name == "gae":
        part["lam"] = _discount(values, *LAM)
        result += settings({"algorithm.critic": {}})
    return part, result


def _discount(values: Values, *places: str) -> float:
    """The value of gamma or lam, whose default is that of the last place."""
    value = values.value(*places)
    return values.value(places[-1]) if value is None else value


_CLIPPING = {
    "clip_advantages": "whether the keys below have an effect, with adv_estimator distill",
    "adv_clip_min": "algorithm.advantage.low, with adv_estimator distill",
    "adv_clip_max": "algorithm.advantage.high, with adv_estimator distill",
}


@translates(RllmAlgorithm, **_CLIPPING)
@translates(UnifiedAlgorithm, **_CLIPPING)
def _clipping(values: Values, part: dict[str, Any]) -> Translation:
    """Set the bounds of the advantages of a distillation."""
    bounds = values.setting(*CLIP_MIN), values.setting(*CLIP_MAX)
    if not values.value(*CLIPS):
        unused = values.set_keys(*CLIP_MIN, *CLIP_MAX)
        return no_effect(unused, "it has an effect only with clip_advantages: true.")
    low, high = (bound.value for bound in bounds)
    if low is not None and high is not None and low > high:
        return fault(bounds[0].key, f"{low:g} is above {bounds[1].key}, {high:g}.", "Lower it.")
    part |= {"low": low, "high": high}
    return NOTHING


@translates(UnifiedAlgorithm, router_replay="model.router_replay: replay, for R3")
def _router_replay(values: Values) -> Translation:
    key = "rllm.algorithm.router_replay"
    mode = values.value(key) if values.has(key) else "disabled"
    if mode in ("disabled", False, "", "none"):
        return NOTHING
    if mode == "R3":
        return settings({"model.router_replay": "replay"})
    if mode == "R2":
        problem = "R2 replays the routing of the trainer's own first pass, which the Tinker API does not return."
        return fault(key, problem, "Use R3, which replays that of the sampler, or disabled.")
    return fault(key, f"there is no '{mode}'.", "It is disabled or R3.")


@translates(
    RllmAlgorithm,
    shared_tokenizer="the teacher always reads the tokens of the policy, as with true",
)
@translates(
    RllmTeacher,
    backend="only tinker: a teacher must return logprobs of the policy's tokens",
    model="algorithm.teacher, with adv_estimator distill",
    base_url="refused with distill, unless backend is tinker: the teacher is on the run's server",
)
def _teacher(values: Values, estimator: str) -> Translation:
    section = "algorithm.teacher_rollout_args"
    keys = [f"{section}.{name}" for name in ("backend", "model", "base_url")]
    if estimator != "distill":
        unused = values.set_keys(*keys, "algorithm.shared_tokenizer")
        return no_effect(unused, "it has an effect only with adv_estimator distill.")
    result = NOTHING
    if values.value(f"{section}.backend") != "tinker":
        problem = "a teacher must return logprobs of the policy's tokens, which the OpenAI API does not."
        result += fault(f"{section}.backend", problem, "Serve it with tinsmith serve, and set backend: tinker.")
    elif values.set_keys(f"{section}.base_url"):
        result += note(f"{section}.base_url: the teacher is a model of the run's own server.")
    if not values.value("algorithm.shared_tokenizer"):
        result += note("algorithm.shared_tokenizer: the teacher must have the tokenizer of the model.")
    return result + settings({"algorithm.teacher": values.value(f"{section}.model")})


@translates(RllmAlgorithm, grouping_level="algorithm.grouping: role (trajectory), turn (step) or rollout (episode)")
@translates(
    StepwiseAdvantage,
    enable="whether the keys below have an effect",
    mode="algorithm.grouping: role (broadcast) or turn (per_step)",
    normalize_by_steps="algorithm.advantage: step_wise_grpo with by_turns, for grpo with broadcast",
)
def _grouping(values: Values) -> Translation:
    level = values.setting("algorithm.grouping_level")
    if level.value not in GROUPINGS:
        return fault(level.key, f"there is no '{level.value}'.", did_you_mean(level.value, GROUPINGS))
    result = settings({"algorithm.grouping": GROUPINGS[level.value]})
    if level.value == "step" and values.set_keys(*GAMMA):
        result += settings({"algorithm.turn_discount": values.value(*GAMMA)})
    return result + (_stepwise(values) if values.has("rllm.backend") else NOTHING)


def _stepwise(values: Values) -> Translation:
    section = "rllm.stepwise_advantage"
    mode, by_steps = values.value(f"{section}.mode"), values.value(f"{section}.normalize_by_steps")
    if not values.value(f"{section}.enable"):
        unused = values.set_keys(f"{section}.mode", f"{section}.normalize_by_steps")
        return no_effect(unused, f"it has an effect only with {section}.enable: true.")
    if mode not in ("broadcast", "per_step"):
        return fault(f"{section}.mode", f"there is no '{mode}'.", "It is broadcast or per_step.")
    result = settings({"algorithm.grouping": "turn" if mode == "per_step" else "role"})
    if not by_steps:
        return result
    if mode == "per_step" or not is_grpo(values):
        fix = "Leave it out, or use mode: broadcast and adv_estimator: grpo."
        return result + fault(f"{section}.normalize_by_steps", "it divides grpo's advantage of a trajectory.", fix)
    part, _ = advantage(values, "grpo", ESTIMATOR[0], {})
    return result + settings({"algorithm.advantage": {**part, "type": "step_wise_grpo", "by_turns": True}})


@translates(
    UnifiedAlgorithm,
    loss_fn="algorithm.loss; null is ppo for grpo and importance_sampling for other estimators",
    eps_clip="algorithm.loss: clip_low, clip_high, of a loss that clips",
    eps_clip_high="algorithm.loss.clip_high; null is eps_clip",
)
def _loss(values: Values) -> Translation:
    """tinker_rl_trainer has importance_sampling alone."""
    if not values.has("rllm.backend"):
        return settings({"algorithm.loss": {"type": "importance_sampling"}})
    name = values.setting("rllm.algorithm.loss_fn")
    if name.is_set and str(name.value).startswith("dppo"):
        return fault(name.key, f"the loss '{name.value}' is not offered.", f"Known here: {', '.join(LOSSES)}.")
    if name.is_set and name.value not in LOSSES:
        return fault(name.key, f"there is no '{name.value}'.", did_you_mean(name.value, LOSSES))
    loss = loss_name(values)
    low, high = values.setting("rllm.algorithm.eps_clip"), values.setting("rllm.algorithm.eps_clip_high")
    part = dict(LOSSES[loss])
    if loss in _CLIPPED:
        part |= {"clip_low": low.value, "clip_high": low.value if high.value is None else high.value}
        return settings({"algorithm.loss": part})
    unused = values.set_keys(low.key, high.key)
    return settings({"algorithm.loss": part}) + no_effect(
        unused, f"the loss {loss} does not clip; set rllm.algorithm.loss_fn: ppo."
    )


def is_grpo(values: Values) -> bool:
    """Whether the estimator is grpo."""
    return str(values.value(*ESTIMATOR)).lower() == "grpo"


def loss_name(values: Values) -> str:
    """rLLM's name of the loss that the estimator is trained with."""
    if not values.has("rllm.backend"):
        return "importance_sampling"
    default = "ppo" if is_grpo(values) else "importance_sampling"
    return str(values.value("rllm.algorithm.loss_fn") or default)


@translates(UnifiedAlgorithm, loss_agg_mode="algorithm.aggregate; null is token_sum, as on Tinker's server")
def _aggregate(values: Values) -> Translation:
    mode = values.setting("rllm.algorithm.loss_agg_mode") if values.has("rllm.backend") else Setting("", None, False)
    if mode.value is None:
        return settings({"algorithm.aggregate": "token_sum"})
    if mode.value not in AGGREGATES:
        return fault(mode.key, f"there is no '{mode.value}'.", did_you_mean(mode.value, AGGREGATES))
    return settings({"algorithm.aggregate": AGGREGATES[mode.value]})


@translates(UnifiedAlgorithm, kl_beta="algorithm.kl: k2 with this coefficient, a term of the loss")
def _divergence(values: Values) -> Translation:
    beta = values.value("rllm.algorithm.kl_beta") if values.has("rllm.backend") else 0.0
    if beta < 0:
        return fault("rllm.algorithm.kl_beta", f"{beta} is below 0.", "Set 0 or more.")
    return settings({"algorithm.kl": {"type": "k2", "coef": beta} if beta else {"type": "none"}})


@translates(
    RolloutCorrection,
    bypass_mode="algorithm.correction: false is proximal, or tis with tis_mode",
    tis_mode="algorithm.correction: tis, with level token or sequence",
    tis_cap="algorithm.correction.cap, with tis_mode",
)
def _correction(values: Values) -> Translation:
    if not values.has("rllm.backend"):
        return NOTHING
    section = "rllm.algorithm.rollout_correction"
    mode, cap = values.value(f"{section}.tis_mode"), values.value(f"{section}.tis_cap")
    if mode is None:
        unused = no_effect(values.set_keys(f"{section}.tis_cap"), f"it has an effect only with {section}.tis_mode.")
        anchored = values.value(f"{section}.bypass_mode") is False
        return unused + (settings({"algorithm.correction": {"type": "proximal"}}) if anchored else NOTHING)
    if mode not in ("token", "sequence"):
        return fault(f"{section}.tis_mode", f"there is no '{mode}'.", "It is token or sequence.")
    return settings({"algorithm.correction": {"type": "tis", "level": mode, "cap": cap}})


@translates(RllmSettings, mask_truncated_samples="algorithm.mask_truncated")
@translates(UnifiedAgent, overlong_filter="algorithm.mask_truncated")
def _truncated(values: Values) -> Translation:
    keys = ("rllm.mask_truncated_samples", "rllm.agent.overlong_filter")
    masked = values.has("rllm.backend") and any(values.value(key) for key in keys)
    return settings({"algorithm.mask_truncated": True}) if masked else NOTHING


def roles(values: Values, by_role: Mapping[str, Any], estimators: Mapping[str, Part]) -> Translation:
    """`algorithm.roles`: `by_role` maps a role to its estimator, or to (estimator, loss)."""

    def of_role(role: str, chosen: Any) -> Translation:
        name, loss = (chosen, None) if isinstance(chosen, str) else (*chosen, None)[:2]
        key = f"traj_group_adv_estimator_map[{role!r}]"
        part, result = advantage(values, str(name), key, estimators)
        if loss not in (None, loss_name(values)):
            problem = f"the loss of this run is {loss_name(values)}, for all roles."
            result += fault(key, problem, "Leave out the loss of the role, or set rllm.algorithm.loss_fn.")
        return result + (settings({f"algorithm.roles.{role}.advantage": part}) if part else NOTHING)

    return combine(of_role(role, chosen) for role, chosen in by_role.items())
