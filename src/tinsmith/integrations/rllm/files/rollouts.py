"""rLLM's rollouts: model, lengths, sampling, workflow, and which rollouts are trained on."""

from __future__ import annotations

from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, combine, fault, note, settings, translates
from tinsmith.integrations.rllm.files.algorithm import loss_name
from tinsmith.integrations.rllm.files.schema import (
    RllmAgent,
    RllmAlgorithm,
    RllmData,
    RllmEngine,
    RllmEnvironment,
    RllmFile,
    RllmSampling,
    RllmTraining,
    RllmValidationSampling,
    RllmWorkflow,
)
from tinsmith.integrations.rllm.files.schema_unified import (
    CompactFiltering,
    RejectionSample,
    RllmSettings,
    RolloutSampling,
    UnifiedAgent,
    UnifiedData,
    UnifiedFile,
    UnifiedWorkflow,
    WorkflowArguments,
)
from tinsmith.integrations.rllm.files.values import (
    ATTEMPTS,
    DISABLE_THINKING,
    EVAL_MAX_TOKENS,
    EVAL_TEMPERATURE,
    EVAL_TOP_K,
    EVAL_TOP_P,
    GROUP_SIZE,
    MAX_PROMPT,
    MAX_RESPONSE,
    MAX_TOKENS,
    PARALLEL,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Setting,
    Values,
    no_effect,
)
from tinsmith.plurals import counted
from tinsmith.rl.plugins import Names

REASONS = {
    "mask_max_prompt_length_exceeded": "max_prompt",
    "mask_max_response_length_exceeded": "max_response",
    "mask_env_done": "done",
    "mask_max_turns_exceeded": "max_turns",
    "mask_timeout": "timeout",
    "mask_error": "error",
}
"""Key of compact_filtering -> how a rollout ended."""
REFILLS = 10
"""Additional batches to sample until enough tasks are solved in part."""


SINGLE_ROLLOUTS = settings({"rollout.split": 1})
"""A workflow of rLLM makes one rollout, which has its own time limit and place."""


def translate(values: Values, plugins: Names) -> Translation:
    """`model`, `sampling`, `eval` (how it samples), `workflow`, `rollout` and `filters`."""
    return combine(
        [
            _server(values),
            _thinking(values),
            _lengths(values),
            _sampling(values),
            _workflow(values, plugins),
            _tasks(values),
            _limits(values),
            _filters(values),
        ]
    )


@translates(RllmFile, tinker_base_url="model.base_url; null is TINKER_BASE_URL, or else a service that the run starts")
@translates(
    UnifiedFile, tinker_base_url="model.base_url; null is TINKER_BASE_URL, or else a service that the run starts"
)
@translates(RllmSettings, backend="only tinker: training goes through the Tinker API")
def _server(values: Values) -> Translation:
    result, url = NOTHING, values.value("tinker_base_url")
    if values.has("rllm.backend") and (backend := values.value("rllm.backend")) != "tinker":
        problem = f"'{backend}' is not supported; training goes through the Tinker API."
        result += fault("rllm.backend", problem, "Set rllm/backend=tinker, and its keys in place of the other's.")
    return result + (settings({"model.base_url": url}) if url else NOTHING)


@translates(
    RllmEngine,
    disable_thinking="model.chat_template_values.enable_thinking: false",
    reasoning_effort="model.chat_template_values.reasoning_effort, if set",
    accumulate_reasoning="always true: a reply stays in its conversation with its own tokens",
    renderer_name="the chat template of the model; a name that ends with disable_thinking disables it",
)
@translates(
    RllmSettings,
    disable_thinking="model.chat_template_values.enable_thinking: false",
    accumulate_reasoning="always true: a reply stays in its conversation with its own tokens",
)
def _thinking(values: Values) -> Translation:
    result, engine = NOTHING, "rollout_engine"
    renderer, effort = values.value(f"{engine}.renderer_name"), values.setting(f"{engine}.reasoning_effort")
    if effort.is_set:
        result += settings({"model.chat_template_values.reasoning_effort": effort.value})
    if renderer:
        result += note(f"{engine}.renderer_name: the chat template of the model is used, whatever the renderer.")
    for key in values.set_keys("rllm.accumulate_reasoning", f"{engine}.accumulate_reasoning"):
        if not values.value(key):
            result += note(f"{key}: a reply stays in its conversation with its own tokens, reasoning included.")
    if values.value(*DISABLE_THINKING) or str(renderer).endswith("disable_thinking"):
        result += settings({"model.chat_template_values.enable_thinking": False})
    return result


@translates(
    RllmData,
    max_prompt_length="sampling.max_prompt_tokens",
    max_response_length="sampling.max_tokens",
)
@translates(
    UnifiedData,
    max_prompt_length="sampling.max_prompt_tokens",
    max_response_length="sampling.max_tokens",
)
@translates(
    RllmTraining,
    max_length="sampling.max_total_tokens, where prompt and reply may be longer: a long prompt leaves a shorter reply",
)
@translates(RolloutSampling, max_tokens="sampling.max_tokens or eval.max_tokens; null is max_response_length")
@translates(RllmValidationSampling, max_tokens="eval.max_tokens; null is as in training")
def _lengths(values: Values) -> Translation:
    prompt, total = values.value(*MAX_PROMPT), values.value("training.max_length")
    chosen = values.setting(*MAX_TOKENS) if values.has("rllm.backend") else values.setting(*MAX_RESPONSE)
    reply = chosen.value or values.value(*MAX_RESPONSE)
    evaluated = values.value(*EVAL_MAX_TOKENS)
    for key, value in ((values.setting(*MAX_PROMPT).key, prompt), (chosen.key, reply)):
        if value < 1:
            return fault(key, f"{value} is not a length.", "Set 1 or more.")
    if total < 2:
        return fault("training.max_length", f"{total} leaves no room for a prompt and a reply.", "Raise it.")
    result = settings({"sampling.max_prompt_tokens": min(prompt, total - 1), "sampling.max_tokens": min(reply, total)})
    if prompt + reply > total:
        text = f"prompt and reply have at most {total} tokens, so that a long prompt leaves a shorter reply."
        result += settings({"sampling.max_total_tokens": total}) + note(f"training.max_length: {text}")
    return result + (settings({"eval.max_tokens": evaluated}) if evaluated else NOTHING)


@translates(
    RllmSampling,
    temperature="sampling.temperature; also other values than 1, with which rLLM stops",
    top_p="sampling.top_p; below 1 with algorithm.old_logprobs: recomputed. rLLM stops with other values than 1",
)
@translates(
    RllmValidationSampling,
    temperature="eval.temperature; null is as in training",
    top_p="eval.top_p; null is as in training",
)
@translates(
    RolloutSampling,
    temperature="sampling.temperature or eval.temperature",
    top_p="sampling.top_p or eval.top_p",
    top_k="sampling.top_k or eval.top_k",
)
def _sampling(values: Values) -> Translation:
    temperature, top_p = values.setting(*TEMPERATURE), values.setting(*TOP_P)
    warm = 1.0 if temperature.value is None else temperature.value
    result = settings({"sampling.temperature": warm})
    own = {"sampling.top_p": top_p.value, "eval.top_p": values.value(*EVAL_TOP_P)}
    if values.has("rllm.backend"):
        own |= {"sampling.top_k": values.value(*TOP_K), "eval.top_k": values.value(*EVAL_TOP_K)}
    result += settings({key: value for key, value in own.items() if value is not None})
    evaluation = values.value(*EVAL_TEMPERATURE)
    result += settings({"eval.temperature": warm if evaluation is None else evaluation})
    restricted = warm == 0 or (top_p.value or 1.0) < 1 or result.settings["sampling"].get("top_k", -1) > 0
    if restricted and loss_name(values) != "cross_entropy":
        result += settings({"algorithm.old_logprobs": "recomputed"})
    return result + _sampling_note(values, temperature, top_p)


def _sampling_note(values: Values, temperature: Setting, top_p: Setting) -> Translation:
    """A note on settings with which training is not on-policy; tinker_rl_trainer stops with them."""
    changed = [setting for setting in (temperature, top_p) if setting.value not in (1.0, None)]
    if not changed:
        return NOTHING
    unset = "" if any(setting.is_set for setting in changed) else ", by rLLM's defaults"
    keys = " and ".join(f"{setting.key} {setting.value:g}" for setting in changed)
    stops = "" if values.has("rllm.backend") else " rLLM stops with other values than 1."
    text = "replies are sampled so; algorithm.old_logprobs says with which logprobs they are trained on."
    return note(f"{keys}{unset}: {text} Training is on-policy only where both are 1.{stops}")


@translates(
    RllmWorkflow,
    path="workflow: custom, the class or function at module:attribute; a key of Tinsmith's own",
    args="workflow.args; a key of Tinsmith's own",
)
def _workflow(values: Values, plugins: Names) -> Translation:
    path, arguments = values.value("workflow.path"), values.value("workflow.args")
    if not path:
        return note("workflow.args: it has an effect only with workflow.path.") if arguments else NOTHING
    if ("workflow", path) in plugins:
        return SINGLE_ROLLOUTS + settings({"workflow": {"type": path, **arguments}})
    return SINGLE_ROLLOUTS + settings({"workflow": {"type": "custom", "path": path, "args": dict(arguments)}})


@translates(
    RllmAgent,
    max_steps="turns of an agent class with an environment class, which only a script has",
    agent_args="arguments of an agent class, which only a script has",
)
@translates(RllmEnvironment, env_args="arguments of an environment class, which only a script has")
def agents(values: Values) -> Translation:
    """Notes on keys that a file sets for an agent class with an environment class."""
    keys = [key for key in ("agent.max_steps", "agent.agent_args", "env.env_args") if values.has(key)]
    unused = values.set_keys(*keys)
    return (
        note(f"{', '.join(unused)}: only a script has an agent class with an environment class.") if unused else NOTHING
    )


@translates(
    RllmData,
    train_files="tasks.train: a file with question and ground_truth; a script gives its datasets itself",
    val_files="tasks.eval, in the same way; if not set, nothing is evaluated",
)
def _tasks(values: Values) -> Translation:
    result = NOTHING
    for key, part in (("data.train_files", "train"), ("data.val_files", "eval")):
        if path := values.value(key):
            source = {"type": "files", "path": path, "prompt": "{question}", "answer": "{ground_truth}"}
            result += settings({f"tasks.{part}": {**source, "answer_optional": True, "extra": ["*"]}})
            result += settings({"tasks.held_out": 0})
    return result


@translates(
    RllmWorkflow,
    n_parallel_tasks="rollout.concurrency; rollout.split: 1, so that it counts rollouts of a workflow of one's own",
    retry_limit="rollout.retries: attempts after the first",
)
@translates(
    UnifiedWorkflow,
    n_parallel_tasks="rollout.concurrency; rollout.split: 1, so that it counts rollouts of a workflow of one's own",
    retry_limit="rollout.retries: attempts after the first",
)
@translates(
    WorkflowArguments,
    timeout="rollout.timeout in seconds, if set",
    gamma="discount of the rewards of steps, of a workflow class of rLLM",
    reward_bonus_coeff="shaping of the rewards of steps, of a workflow class of rLLM",
)
@translates(UnifiedAgent, trajectory_timeout="rollout.timeout in seconds")
def _limits(values: Values) -> Translation:
    parallel, attempts = values.setting(*PARALLEL), values.setting(*ATTEMPTS)
    for setting in (parallel, attempts):
        if setting.value < 1:
            return fault(setting.key, f"{setting.value} is too few.", "Set 1 or more.")
    result = settings({"rollout.concurrency": parallel.value, "rollout.retries": attempts.value - 1})
    if values.has("rllm.backend"):
        timeout = values.setting("rllm.agent.trajectory_timeout", "rllm.workflow.workflow_args.timeout")
        if timeout.is_set:
            result += settings({"rollout.timeout": timeout.value})
    return result


@translates(RllmAlgorithm, remove_constant_reward_groups="filters: reward_std")
@translates(
    CompactFiltering,
    enable="filters: termination, with the reasons of the keys below",
    **{name: f"reason {reason} of the filter, with enable: true" for name, reason in REASONS.items()},
)
@translates(
    RejectionSample,
    min_trajs_per_group="filters: group_size, if above 1; its default not with a group size of 1",
    filter_uniform_groups="filters: reward_std",
)
def _filters(values: Values) -> Translation:
    filters: list[dict[str, Any]] = []
    uniform, result = values.value("algorithm.remove_constant_reward_groups"), NOTHING
    if values.has("rllm.backend"):
        section = "rllm.compact_filtering"
        reasons = [reason for name, reason in REASONS.items() if values.value(f"{section}.{name}")]
        if not values.value(f"{section}.enable"):
            unused = values.set_keys(*(f"{section}.{name}" for name in REASONS))
            result += no_effect(unused, f"it has an effect only with {section}.enable: true.")
        elif reasons:
            filters.append({"type": "termination", "reasons": reasons})
        least = values.setting("rllm.rejection_sample.min_trajs_per_group")
        if least.value > 1 and (least.is_set or values.value(*GROUP_SIZE) != 1):
            filters.append({"type": "group_size", "least": least.value})
        uniform = uniform or values.value("rllm.rejection_sample.filter_uniform_groups")
        result += _rejection(values)
    if uniform:
        filters.append({"type": "reward_std"})
    return result + (settings({"filters": filters}) if filters else NOTHING)


@translates(
    RejectionSample,
    enable="whether multiplier and min_partial_solve_tasks have an effect",
    multiplier="filter_refills: 10, or this minus 1 if it is more",
    min_partial_solve_tasks="min_partial_groups",
)
def _rejection(values: Values) -> Translation:
    """Sample until enough tasks are solved in part."""
    section = "rllm.rejection_sample"
    keys = [f"{section}.multiplier", f"{section}.min_partial_solve_tasks"]
    multiplier, least = map(values.value, keys)
    if not values.value(f"{section}.enable"):
        return no_effect(values.set_keys(*keys), f"it has an effect only with {section}.enable: true.")
    refills = max(multiplier - 1, REFILLS)
    batches = f"up to {counted(refills, 'more batch')}"
    text = f"{batches} are sampled for {counted(least, 'task')} solved in part; then the run fails."
    return settings({"min_partial_groups": max(0, least), "filter_refills": refills}) + note(f"{section}: {text}")
