"""Translation of a TOML file of minds_RL, and of the environment variables that its runner reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.dialects.base import (
    NOTHING,
    Dialect,
    Key,
    Translation,
    check_faults,
    combine,
    did_you_mean,
    fault,
    keys,
    note,
    settings,
    translate_declared,
    translates,
)
from tinsmith.dialects.unread import is_unread
from tinsmith.integrations.minds.files import environments
from tinsmith.integrations.minds.files.schema import (
    MindsComponent,
    MindsEnvironment,
    MindsFile,
    MindsModel,
    MindsTrainer,
)
from tinsmith.plurals import counted
from tinsmith.rl.plugins import Names
from tinsmith.settings import build

LOSSES: Mapping[str, Mapping[str, Any]] = {
    "importance_sampling": {"type": "importance_sampling"},
    "ppo": {"type": "ppo", "dual_clip": None},
    "cispo": {"type": "cispo"},
    "dro": {"type": "dro"},
}
"""loss_fn -> settings of a loss."""
RENDERERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"enable_thinking": True},
    "qwen3_disable_thinking": {"enable_thinking": False},
    "gpt_oss_no_sysprompt": {},
    "gpt_oss_low_reasoning": {"reasoning_effort": "low"},
    "gpt_oss_medium_reasoning": {"reasoning_effort": "medium"},
    "gpt_oss_high_reasoning": {"reasoning_effort": "high"},
    "deepseekv3": {"thinking": True},
    "deepseekv3_disable_thinking": {"thinking": False},
    "qwen3_instruct": {},
    "llama3": {},
    "kimi_k2": {},
}
"""renderer_name -> variables of the model's own chat template that mean the same."""
ROLE_COLON = "role_colon"
_SMALL_RATE = 1e-5
_MARKS = {
    "env": {"id"},
    "trainer": {"rollouts_per_example", "groups_per_batch", "async_off_policy_steps", "stream_minibatches", "loss_fn"},
    "model": {"base_model", "renderer_name"},
    "tinker": {"api_key_env"},
}
"""Keys of sections that neither Tinsmith's run files nor those of other systems have."""


def recognizes(values: Mapping[str, Any]) -> bool:
    """Whether these are keys of a file of minds_RL."""
    sections = ((values.get(name), marks) for name, marks in _MARKS.items())
    return not is_unread(values) and (
        "envs" in values
        or any(isinstance(section, Mapping) and not marks.isdisjoint(section) for section, marks in sections)
    )


def file_keys() -> Iterator[Key]:
    """Every key of a file, with its fate."""
    return keys(MindsFile)


def translate(
    values: Mapping[str, Any], place: str, plugins: Names = frozenset(), overrides: Sequence[str] = ()
) -> Translation:
    """The settings and notes of a file. Raises ConfigError with every fault."""
    file = build(MindsFile, values, place, overrides)
    parts = [
        translate_declared(file),
        settings({"algorithm.type": "grpo"}),
        _environments(file),
        _lengths(file.trainer),
        _group(file.trainer),
        _staleness(file.trainer),
        _training(file.trainer),
        _template(file.model),
        _variables(Path(place).stem),
    ]
    return check_faults(combine(parts), place)


@translates(
    MindsEnvironment,
    id="environments: type, by the name in the id, else verifiers",
    args="environments: keys of the type",
)
@translates(
    MindsComponent,
    id="environments: type, by the name in the id, else verifiers",
    name="environments: name; the last part of the id if it is not set",
    weight="environments: weight; 1 if it is not set, and 0 is only evaluated",
    ratio="the same as weight",
    args="environments: keys of the type",
)
def _environments(file: MindsFile) -> Translation:
    components = [(f"envs[{number}]", each) for number, each in enumerate(file.envs)]
    result = NOTHING
    if file.env is not None and components:
        result += note("env: not used, because envs is set.")
    elif file.env is not None:
        components = [("env", MindsComponent(id=file.env.id, args=file.env.args))]
    if not components:
        return fault("env", "there is no environment.", "Add [env] or [[envs]] with an id.")
    identifiers, entries = [], []
    for place, component in components:
        if component.weight is not None and component.ratio is not None:
            result += fault(f"{place}.ratio", "weight is set too.", "Leave out one of them.")
        weight = next((each for each in (component.weight, component.ratio) if each is not None), 1.0)
        part, more = environments.translate(component.id, component.args, place, weight)
        result += more
        if part:
            name = component.name or environments.title(component.id)
            entries.append({**part, "name": name, "weight": weight})
            identifiers.append(component.id)
    environments.share_held_out_words(identifiers, entries)
    return result + settings({"environments": entries})


@translates(
    MindsTrainer,
    groups_per_batch="groups_per_step; 4 if it is not set",
    batch_size="the same as groups_per_batch",
    total_batches="steps; 100000 if it is not set",
    num_batches="the same as total_batches",
    stream_minibatches="updates.stream, at most groups_per_batch",
)
def _lengths(trainer: MindsTrainer) -> Translation:
    result = NOTHING
    pairs = (("groups_per_batch", "batch_size", 4), ("total_batches", "num_batches", 100_000))
    chosen = []
    for name, alias, default in pairs:
        first, second = trainer.__dict__[name], trainer.__dict__[alias]
        if first is not None and second is not None:
            result += fault(f"trainer.{alias}", f"trainer.{name} is set too.", "Leave out one of them.")
        chosen.append(first or second or default)
    groups, steps = chosen
    stream = min(trainer.stream_minibatches, groups)
    if stream < trainer.stream_minibatches and "stream_minibatches" in trainer.model_fields_set:
        result += note(
            f"trainer.stream_minibatches: a batch of {counted(groups, 'group')} has at most {counted(groups, 'part')}."
        )
    return result + settings({"groups_per_step": groups, "steps": steps, "updates.stream": stream})


@translates(
    MindsTrainer, rollouts_per_example="group_size; 1 trains on the reward itself, which nothing is compared with"
)
def _group(trainer: MindsTrainer) -> Translation:
    result = settings({"group_size": trainer.rollouts_per_example})
    if trainer.rollouts_per_example > 1:
        return result
    text = "a group of one has no others to compare with, so that its advantage is its reward."
    advantage = {"type": "grpo", "normalize": "none", "std_threshold": None}
    return result + settings({"algorithm.advantage": advantage}) + note(f"trainer.rollouts_per_example: {text}")


@translates(MindsTrainer, async_off_policy_steps="staleness")
def _staleness(trainer: MindsTrainer) -> Translation:
    steps = trainer.async_off_policy_steps
    high = settings({"allow_high_staleness": True}) if steps > 8 else NOTHING
    return settings({"staleness": steps}) + high


@translates(
    MindsTrainer,
    learning_rate="optimizer.learning_rate",
    loss_fn="algorithm.loss: importance_sampling, ppo, cispo or dro, with the advantages of grpo without deviations",
)
def _training(trainer: MindsTrainer) -> Translation:
    if trainer.loss_fn not in LOSSES:
        return fault("trainer.loss_fn", f"there is no '{trainer.loss_fn}'.", did_you_mean(trainer.loss_fn, LOSSES))
    rate = trainer.learning_rate
    values = {"optimizer.learning_rate": rate, "algorithm.loss": dict(LOSSES[trainer.loss_fn])}
    small = note(f"trainer.learning_rate: {rate:g} is small for LoRA, where 1e-5 to 1e-4 is usual.")
    return settings(values) + (small if rate < _SMALL_RATE else NOTHING)


@translates(
    MindsModel,
    renderer_name="model.chat_template_values of the model's own template, by the table in the guide",
    renderer="the same as renderer_name",
)
def _template(model: MindsModel) -> Translation:
    if model.renderer_name and model.renderer:
        return fault("model.renderer", "model.renderer_name is set too.", "Leave out one of them.")
    name, key = model.renderer_name or model.renderer, "renderer_name" if model.renderer_name else "renderer"
    if not name:
        return NOTHING
    if name == ROLE_COLON:
        fix = "Leave it out for the model's own chat template, or set model.chat_template to a template file."
        return fault(f"model.{key}", f"{ROLE_COLON} is not a template of the model.", fix)
    if name not in RENDERERS:
        fix = f"{did_you_mean(name, RENDERERS)} Without it, the model's own chat template is used."
        return fault(f"model.{key}", f"the renderer '{name}' is not known.", fix)
    values = RENDERERS[name]
    return settings({"model.chat_template_values": dict(values)}) if values else NOTHING


def _variables(stem: str) -> Translation:
    """Environment variables of minds_RL's runner. TINKER_API_KEY and TINKER_BASE_URL are Tinsmith's own too."""
    result = NOTHING
    if limit := os.environ.get("CURRICULUM_TIME_LIMIT_SECONDS", ""):
        result += settings({"time_limit": limit})
        result += note(f"CURRICULUM_TIME_LIMIT_SECONDS: time_limit is {limit} seconds.")
    if project := os.environ.get("WANDB_PROJECT", ""):
        monitors = [{"type": "console"}, {"type": "report"}, {"type": "wandb", "project": project}]
        result += settings({"monitors": monitors}) + note(f"WANDB_PROJECT: the run is logged to {project} of W&B.")
    if run := os.environ.get("RUN_ID", ""):
        folder = str(Path("outputs") / run / stem)
        result += settings({"folder": folder}) + note(f"RUN_ID: the folder is {folder}.")
    if os.environ.get("MASTER_CONFIG_PATH", ""):
        result += note("MASTER_CONFIG_PATH: not used; the command names the file.")
    return result


DIALECT = Dialect(
    name="minds_RL", guide="docs/from/minds.md", schema=MindsFile, recognizes=recognizes, translate=translate
)
