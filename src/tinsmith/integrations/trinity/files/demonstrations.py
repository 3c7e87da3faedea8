"""Trinity's sample strategies and buffers of demonstrations: `demonstrations`, and the staleness bound.

The algorithms sft, cpt and dpo train on demonstrations only; mix and mix_chord on demonstrations and rollouts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tinsmith.dialects.base import NOTHING, Translation, combine, fault, note, note_unused, settings, translates
from tinsmith.integrations.trinity.files.data import order, row_source
from tinsmith.integrations.trinity.files.name_tables import DEFAULT_GROUP_SIZES, MIXED, SUPERVISED
from tinsmith.integrations.trinity.files.schema import Algorithm, TrinityFile
from tinsmith.integrations.trinity.files.schema_buffer import DemonstrationFormat, ExperienceBuffer
from tinsmith.plurals import counted

PLACE = "buffer.trainer_input"
STRATEGIES = ("default", "staleness_control", "mix", "warmup")
ARGUMENTS = "algorithm.sample_strategy_args"
_FORMAT_KEYS = (
    "messages_key", "prompt_key", "response_key", "chosen_key", "rejected_key", "tools_key",
    "enable_concatenated_multi_turn",
)  # fmt: skip
"""Keys of a format that only some kinds of demonstrations use."""


class SampleStrategy(NamedTuple):
    """What a sample strategy becomes."""

    translation: Translation
    max_staleness: int | None = None
    """Age in steps beyond which rollouts are dropped."""


def is_mixed(file: TrinityFile) -> bool:
    """Whether the run trains on demonstrations and rollouts together."""
    return file.algorithm.algorithm_type in MIXED


class BatchShares(NamedTuple):
    """Rows of a training batch."""

    policy: int
    demonstrations: int


def batch_shares(file: TrinityFile) -> BatchShares:
    """Replies of the policy, and demonstrations, of which Trinity takes the share of the batch rounded up."""
    group = file.algorithm.repeat_times or DEFAULT_GROUP_SIZES.get(file.algorithm.algorithm_type, 2)
    size = file.buffer.train_batch_size or file.buffer.batch_size * group
    number = math.ceil(demonstration_share(file) * size) if is_mixed(file) else 0
    return BatchShares(size - number, number)


def demonstration_share(file: TrinityFile) -> float:
    """The share of demonstrations in a training batch; 0 where the file does not give a number."""
    share = (file.algorithm.sample_strategy_args or {}).get("expert_data_ratio", 0.5)
    return float(share) if isinstance(share, int | float) else 0.0


@translates(
    Algorithm,
    sample_strategy="demonstrations for mix; buffer.max_staleness for staleness_control",
    sample_strategy_args="with sample_strategy",
)
def sample_strategy(file: TrinityFile) -> SampleStrategy:
    """`demonstrations`, or the bound on the staleness of rollouts."""
    name, strategy = file.algorithm.algorithm_type, file.algorithm.sample_strategy or "default"
    if file.mode == "bench":
        return SampleStrategy(NOTHING)
    if is_mixed(file):
        unused = NOTHING
    else:
        unused = combine(
            note_unused(buffer, f"{PLACE}.auxiliary_buffers.{name}.", "it has an effect only with sample_strategy mix.")
            for name, buffer in file.buffer.trainer_input.auxiliary_buffers.items()
        )
    if strategy not in STRATEGIES:
        fix = f"It is one of {', '.join(STRATEGIES)}."
        return SampleStrategy(fault("algorithm.sample_strategy", f"there is no '{strategy}'.", fix) + unused)
    if (strategy == "mix") != is_mixed(file) and file.algorithm.sample_strategy is not None:
        fix = "Use algorithm_type mix or mix_chord with sample_strategy mix, and only with it."
        problem = f"{strategy} cannot be combined with {name}."
        return SampleStrategy(fault("algorithm.sample_strategy", problem, fix) + unused)
    if name in SUPERVISED:
        return SampleStrategy(_only_demonstrations(file) + unused)
    if is_mixed(file):
        return SampleStrategy(_mixed_demonstrations(file))
    bounded = _staleness(file, strategy)
    return SampleStrategy(bounded.translation + unused, bounded.max_staleness)


def _only_demonstrations(file: TrinityFile) -> Translation:
    name, buffer = file.algorithm.algorithm_type, file.buffer.trainer_input.experience_buffer
    key = f"{PLACE}.experience_buffer"
    if buffer is None or not buffer.path or buffer.storage_type == "queue":
        fix = f"Set storage_type: file and a path under {key}."
        return fault(key, f"{name} trains on demonstrations, and there are none.", fix)
    return (
        _demonstrations(buffer, key, name)
        + order("demonstrations.order", [(key, buffer.data_selector)])
        + settings({"demonstrations.per_step": max(1, file.buffer.train_batch_size)})
    )


def _mixed_demonstrations(file: TrinityFile) -> Translation:
    arguments, allowed = dict(file.algorithm.sample_strategy_args or {}), ("expert_data_ratio", "sft_dataset_name")
    result = combine(
        fault(f"{ARGUMENTS}.{unknown}", "there is no such argument.", f"Known here: {', '.join(allowed)}.")
        for unknown in arguments.keys() - set(allowed)
    )
    share = demonstration_share(file)
    if not 0 < share < 1:
        problem = "it is not a share."
        return result + fault(f"{ARGUMENTS}.expert_data_ratio", problem, "Set a number above 0 and below 1.")
    name = str(arguments.get("sft_dataset_name", "sft_dataset"))
    key, buffer = f"{PLACE}.auxiliary_buffers.{name}", file.buffer.trainer_input.auxiliary_buffers.get(name)
    if buffer is None or not buffer.path:
        problem = f"{file.algorithm.algorithm_type} trains on demonstrations and rollouts, and has no demonstrations."
        return result + fault(key, problem, "Set storage_type: file and a path there.")
    return (
        result
        + _demonstrations(buffer, key, "sft")
        + order("demonstrations.order", [(key, buffer.data_selector)])
        + settings({"demonstrations.per_step": batch_shares(file).demonstrations})
    )


def _staleness(file: TrinityFile, strategy: str) -> SampleStrategy:
    arguments = dict(file.algorithm.sample_strategy_args or {})
    bound = arguments.pop("max_staleness", None) if strategy == "staleness_control" else None
    result = combine(
        fault(f"{ARGUMENTS}.{unknown}", "there is no such argument.", "Leave it out.") for unknown in arguments
    )
    if bound is None:
        return SampleStrategy(result)
    key, offset = f"{ARGUMENTS}.max_staleness", file.synchronizer.sync_offset
    if not isinstance(bound, int) or bound < 0:
        problem = f"{bound} is not a number of steps."
        return SampleStrategy(result + fault(key, problem, "Set a whole number, 0 or more."))
    if file.synchronizer.sync_style == "fixed" and offset > bound:
        fix = "Lower synchronizer.sync_offset, or raise max_staleness."
        result += fault(key, f"batches are {counted(offset, 'step')} old, and all of them would be dropped.", fix)
    return SampleStrategy(result, bound)


@translates(
    DemonstrationFormat,
    prompt_type="demonstrations.data: which of the keys below are used",
    messages_key="demonstrations.data.prompt, with prompt_type messages",
    prompt_key="demonstrations.data.prompt, with prompt_type plaintext",
    response_key="demonstrations.data.reply, with prompt_type plaintext",
    chosen_key="demonstrations.data.chosen, for dpo",
    rejected_key="demonstrations.data.rejected, for dpo",
    tools_key="demonstrations.data.tools_key, for chats",
    enable_concatenated_multi_turn="demonstrations.learn: all",
)
def _demonstrations(buffer: ExperienceBuffer, key: str, name: str) -> Translation:
    """The source of demonstrations, with the fields to prompt with and to train on."""
    source, messages = row_source(buffer, key)
    form, is_chat = buffer.format, buffer.format.prompt_type == "messages" and name != "cpt"
    source = {field: value for field, value in source.items() if field != "reply_prefix"}
    source |= {"prompt": f"{{{form.messages_key if is_chat else form.prompt_key}}}", "answer": ""}
    used, learn = ["messages_key" if is_chat else "prompt_key"], "text" if name == "cpt" else "last"
    if name == "dpo":
        used += ["chosen_key", "rejected_key"]
        source |= {"chosen": f"{{{form.chosen_key}}}", "rejected": f"{{{form.rejected_key}}}"}
    if name == "sft":
        used += ["tools_key", "enable_concatenated_multi_turn"]
        source["tools_key"] = form.tools_key
        learn = "all" if form.enable_concatenated_multi_turn else "last"
    if name == "sft" and not is_chat:
        used.append("response_key")
        source["reply"] = f"{{{form.response_key}}}"
    result = _unused_of_rollouts(buffer, key) + messages
    if unused := [field for field in _FORMAT_KEYS if field in form.model_fields_set and field not in used]:
        keys = ", ".join(f"{key}.format.{field}" for field in unused)
        result += note(f"{keys}: {name} does not use it with prompt_type {form.prompt_type}.")
    return result + settings({"demonstrations.data": source, "demonstrations.learn": learn})


def _unused_of_rollouts(buffer: ExperienceBuffer, key: str) -> Translation:
    why = "it applies to rollouts, and these are demonstrations."
    names: Any = sorted({"capacity", "max_read_timeout"} & buffer.model_fields_set)
    notes = combine(note(f"{key}.{name}: {why}") for name in names)
    return notes + note_unused(buffer.replay_buffer, f"{key}.replay_buffer.", why)
