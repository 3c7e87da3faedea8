"""Trinity's buffers of data to learn from as `experts` of ours: alone for sft, cpt and dpo, beside rollouts for mix."""

from __future__ import annotations

from typing import Any

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.data import order, source
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.dialects.trinity.schema_buffer import Buffer

PLACE = "buffer.trainer_input"
MIXING = ("mix", "mix_chord")
STRATEGIES = ("default", "staleness_control", "mix", "warmup")


def mixed(file: TrinityFile) -> bool:
    """Whether an expert's data stands beside rollouts."""
    return file.algorithm.algorithm_type in MIXING


def ratio(file: TrinityFile) -> float:
    """The expert's share of a training batch; 0 where the file gives no number."""
    share = (file.algorithm.sample_strategy_args or {}).get("expert_data_ratio", 0.5)
    return float(share) if isinstance(share, int | float) else 0.0


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`experts`."""
    name, strategy = file.algorithm.algorithm_type, file.algorithm.sample_strategy or "default"
    if file.mode == "bench":
        return
    if strategy not in STRATEGIES:
        cure = f"It is one of {', '.join(STRATEGIES)}."
        becoming.fault("algorithm.sample_strategy", f"there is no '{strategy}'.", cure)
    elif (strategy == "mix") != (name in MIXING) and file.algorithm.sample_strategy is not None:
        cure = "Use algorithm_type mix or mix_chord with sample_strategy mix, and only with it."
        becoming.fault("algorithm.sample_strategy", f"{strategy} does not go with {name}.", cure)
    elif name in SUPERVISED:
        _alone(file, becoming)
    elif mixed(file):
        _beside(file, becoming)
    else:
        _stale(file, strategy, becoming)
    if not mixed(file):
        for buffer, one in file.buffer.trainer_input.auxiliary_buffers.items():
            idle(one, becoming, f"{PLACE}.auxiliary_buffers.{buffer}.", "it counts only for sample_strategy mix.")


def _alone(file: TrinityFile, becoming: Becoming) -> None:
    name, buffer, key = file.algorithm.algorithm_type, _own(file), f"{PLACE}.experience_buffer"
    if buffer is None or not buffer.path or buffer.storage_type == "queue":
        cure = f"Set storage_type: file and a path under {key}."
        becoming.fault(key, f"{name} learns from data, and there is none.", cure)
        return
    becoming.put("experts.data", _lesson(buffer, key, name, becoming))
    becoming.put("experts.learn", _learn(buffer, name))
    becoming.put("experts.order", order([(key, buffer.data_selector)], becoming))
    becoming.put("experts.per_step", max(1, file.buffer.train_batch_size))


def _beside(file: TrinityFile, becoming: Becoming) -> None:
    arguments = dict(file.algorithm.sample_strategy_args or {})
    known = ("expert_data_ratio", "sft_dataset_name")
    for unknown in arguments.keys() - set(known):
        key = f"algorithm.sample_strategy_args.{unknown}"
        becoming.fault(key, "there is no such argument.", f"Known here: {', '.join(known)}.")
    share = ratio(file)
    if not 0 < share < 1:
        key = "algorithm.sample_strategy_args.expert_data_ratio"
        becoming.fault(key, "it is no share.", "Set a number above 0 and below 1.")
        return
    name = str(arguments.get("sft_dataset_name", "sft_dataset"))
    key = f"{PLACE}.auxiliary_buffers.{name}"
    buffer = file.buffer.trainer_input.auxiliary_buffers.get(name)
    if buffer is None or not buffer.path:
        what = f"{file.algorithm.algorithm_type} learns from an expert's data beside rollouts, and there is none."
        becoming.fault(key, what, "Set storage_type: file and a path there.")
        return
    becoming.put("experts.data", _lesson(buffer, key, "sft", becoming))
    becoming.put("experts.learn", _learn(buffer, "sft"))
    becoming.put("experts.order", order([(key, buffer.data_selector)], becoming))
    becoming.put("experts.ratio", share)


def _stale(file: TrinityFile, strategy: str, becoming: Becoming) -> None:
    arguments = dict(file.algorithm.sample_strategy_args or {})
    bound = arguments.pop("max_staleness", None) if strategy == "staleness_control" else None
    for unknown in arguments:
        becoming.fault(f"algorithm.sample_strategy_args.{unknown}", "there is no such argument.", "Leave it out.")
    if bound is None:
        return
    if not isinstance(bound, int) or bound < 0:
        key = "algorithm.sample_strategy_args.max_staleness"
        becoming.fault(key, f"{bound} updates are no age.", "Set a whole number, 0 or more.")
        return
    if file.synchronizer.sync_style == "fixed" and file.synchronizer.sync_offset > bound:
        cure = "Lower synchronizer.sync_offset, or raise max_staleness."
        what = f"batches are {file.synchronizer.sync_offset} steps old, and all would be left out."
        becoming.fault("algorithm.sample_strategy_args.max_staleness", what, cure)
    becoming.put("buffer.max_staleness", bound)


def _own(file: TrinityFile) -> Buffer | None:
    return file.buffer.trainer_input.experience_buffer


def _lesson(buffer: Buffer, key: str, name: str, becoming: Becoming) -> dict[str, Any]:
    """The source, with which fields are asked, learned, or told apart."""
    _waiting(buffer, key, becoming)
    form = buffer.format
    found = source(buffer, key, becoming)
    found.pop("reply_prefix", None)
    by_chat = form.prompt_type == "messages" and name != "cpt"
    read = ["messages_key" if by_chat else "prompt_key"]
    found["prompt"] = f"{{{form.messages_key if by_chat else form.prompt_key}}}"
    found["answer"] = ""
    if name == "dpo":
        read += ["chosen_key", "rejected_key"]
        found |= {"chosen": f"{{{form.chosen_key}}}", "rejected": f"{{{form.rejected_key}}}"}
    if name == "sft":
        read += ["tools_key", "enable_concatenated_multi_turn"]
        found["tools_key"] = form.tools_key
    if name == "sft" and not by_chat:
        read.append("response_key")
        found["reply"] = f"{{{form.response_key}}}"
    if unread := [one for one in _OF_LESSONS if one in form.model_fields_set and one not in read]:
        keys = ", ".join(f"{key}.format.{one}" for one in unread)
        becoming.note(f"{keys}: of prompt_type {form.prompt_type}, {name} reads none of it.")
    return found


_OF_LESSONS = (
    "messages_key", "prompt_key", "response_key", "chosen_key", "rejected_key", "tools_key",
    "enable_concatenated_multi_turn",
)  # fmt: skip
"""Keys of a format that some lessons have and others have not."""


def _waiting(buffer: Buffer, key: str, becoming: Becoming) -> None:
    """Of rollouts alone."""
    why = "it is about rollouts, and these are data to learn from."
    names = {"capacity", "max_read_timeout"} & buffer.model_fields_set
    for name in sorted(names):
        becoming.note(f"{key}.{name}: {why}")
    idle(buffer.replay_buffer, becoming, f"{key}.replay_buffer.", why)


def _learn(buffer: Buffer, name: str) -> str:
    if name == "cpt":
        return "text"
    return "all" if buffer.format.enable_concatenated_multi_turn and name == "sft" else "last"
