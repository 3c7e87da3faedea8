"""Configuration files of systems that are not read: they are recognized, and refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.errors import ConfigError

NAMES_PAGE = "docs/reference/names.md"
"""Page with the names of other systems and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadFormat:
    """A kind of file that is not read.

    Example: UnreadFormat(name="verl", keys=("actor_rollout_ref",), unless=("rllm",))
    """

    name: str
    keys: tuple[str, ...]
    """Dotted keys, any of which marks the kind; "a=text" is a key whose value is a text."""
    unless: tuple[str, ...] = ()
    """Keys of a kind that is read and may have the same keys."""
    fix: str = ""


_READ = ("explorer", "synchronizer", "rllm", "rewards", "tasks", "groups_per_step")

FORMATS = (
    UnreadFormat(
        name="rLLM's supervised fine-tuning",
        keys=("data.rllm", "optim.lr_scheduler"),
        unless=(*_READ, "deployment", "ckpt", "max_steps"),
        fix="algorithm.type: sft trains on demonstrations. ",
    ),
    UnreadFormat(name="verl", keys=("actor_rollout_ref", "data.micro_batch_size_per_gpu"), unless=("rllm",)),
    UnreadFormat(
        name="verifiers",
        keys=(
            "eval=list", "env.taskset", "env.harness", "taskset.id", "harness.id", "env_id", "env.env_id",
            "env_dir_path", "endpoint", "ablation", "model=text",
        ),
        unless=(*_READ, "envs", "model_name_or_path", "source", "orchestrator"),
        fix="An environment of verifiers is an entry of environments (docs/from/verifiers.md). ",
    ),
    UnreadFormat(
        name="prime-rl",
        keys=(
            "orchestrator", "source=list", "inference", "vllm", "trainer.optim", "trainer.model", "trainer.ckpt",
            "trainer.data", "trainer.weight_broadcast", "weight_broadcast", "rollout_transport", "max_async_level",
            "seq_len", "deployment", "ckpt", "inference_gpu_ids", "trainer_gpu_ids", "rollouts_per_example",
            "environment.id", "optim.lr", "env=list", "data.seq_len", "model.impl", "client.base_url", "log.vf_level",
        ),
        unless=_READ,
    ),
    UnreadFormat(
        name="TRL",
        keys=("model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps"),
        unless=("tasks", "rewards", "rllm", "trainer"),
    ),
    UnreadFormat(name="OpenRLHF", keys=("pretrain", "n_samples_per_prompt", "micro_rollout_batch_size")),
    UnreadFormat(
        name="a TuFT server", keys=("supported_models",), fix="The settings of a server are those of tinsmith serve. "
    ),
)  # fmt: skip


def is_unread(values: Mapping[str, Any]) -> bool:
    """Whether the values are those of a file of a system whose files are not read."""
    return _unread(values) is not None


def refuse_unread(values: Mapping[str, Any], place: str, dialects: Sequence[str]) -> None:
    """Raise ConfigError if the values are those of a file of a system whose files are not read.

    `dialects` are the names of the systems whose files are read.
    """
    if (unread := _unread(values)) is not None:
        form, key = unread
        *names, last = dialects
        systems = f"{', '.join(names)} and {last}" if names else last
        raise ConfigError(
            f"{place} is a file of {form.name}, because it has '{key.partition('=')[0]}'; such files are not read.",
            f"{form.fix}Write a run file; {NAMES_PAGE} has names of other systems and ours. Tinsmith reads its "
            f"own run files and those of {systems}.",
        )


def _unread(values: Mapping[str, Any]) -> tuple[UnreadFormat, str] | None:
    """The format of the values that is not read, and the key that marks it."""
    for form in FORMATS:
        key = next((key for key in form.keys if _has(values, key)), "")
        if key and not any(other in values for other in form.unless):
            return form, key
    return None


def _has(values: Any, key: str) -> bool:
    path, _, form = key.partition("=")
    for part in path.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return isinstance(values, {"text": str, "list": list}[form]) if form else True
