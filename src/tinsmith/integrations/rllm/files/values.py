"""Values of a configuration by dotted key, and the keys that stand in several places.

A key of `MIRRORS` may be set at each of its places, with this precedence: `rllm` on the command line, its mirror there,
`rllm` in the file, its mirror there, the default of `rllm`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tinsmith.dialects.base import NOTHING, Section, Translation, combine, note

GROUP_SIZE = ("rllm.rollout.n", "training.group_size")
EVAL_SIZE = ("rllm.rollout.n_val", "validation.group_size", "training.val_group_size")
BATCH_SIZE = ("rllm.data.train_batch_size", "data.train_batch_size")
MAX_PROMPT = ("rllm.data.max_prompt_length", "data.max_prompt_length")
MAX_RESPONSE = ("rllm.data.max_response_length", "data.max_response_length")
SCHEDULE = ("rllm.algorithm.lr_schedule", "training.lr_schedule")
WARMUP_RATIO = ("rllm.algorithm.warmup_steps_ratio", "training.warmup_steps_ratio")
DISABLE_THINKING = ("rllm.disable_thinking", "rollout_engine.disable_thinking")
ACCUMULATE_REASONING = ("rllm.accumulate_reasoning", "rollout_engine.accumulate_reasoning")
PARALLEL = ("rllm.workflow.n_parallel_tasks", "workflow.n_parallel_tasks")
ATTEMPTS = ("rllm.workflow.retry_limit", "workflow.retry_limit")
ESTIMATOR = ("rllm.algorithm.adv_estimator", "algorithm.adv_estimator")
GAMMA = ("rllm.algorithm.gamma", "algorithm.gamma")
LAM = ("rllm.algorithm.lam", "algorithm.lam")
CLIPS = ("rllm.algorithm.clip_advantages", "algorithm.clip_advantages")
CLIP_MIN = ("rllm.algorithm.adv_clip_min", "algorithm.adv_clip_min")
CLIP_MAX = ("rllm.algorithm.adv_clip_max", "algorithm.adv_clip_max")
NORMALIZE = ("rllm.algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo")
TEMPERATURE = ("rllm.rollout.train.temperature", "sampling.train.temperature", "sampling.temperature")
TOP_P = ("rllm.rollout.train.top_p", "sampling.train.top_p", "sampling.top_p")
TOP_K = ("rllm.rollout.train.top_k", "sampling.train.top_k")
MAX_TOKENS = ("rllm.rollout.train.max_tokens", "sampling.train.max_tokens")
EVAL_TEMPERATURE = ("rllm.rollout.val.temperature", "sampling.val.temperature", "val_sampling.temperature")
EVAL_TOP_P = ("rllm.rollout.val.top_p", "sampling.val.top_p", "val_sampling.top_p")
EVAL_TOP_K = ("rllm.rollout.val.top_k", "sampling.val.top_k")
EVAL_MAX_TOKENS = ("rllm.rollout.val.max_tokens", "sampling.val.max_tokens", "val_sampling.max_tokens")
EPOCHS = ("rllm.trainer.total_epochs", "trainer.total_epochs")
LOGGER = ("rllm.trainer.logger", "trainer.logger")
PROJECT = ("rllm.trainer.project_name", "trainer.project_name")
NAME = ("rllm.trainer.experiment_name", "trainer.experiment_name")
EVAL_EVERY = ("rllm.trainer.test_freq", "trainer.test_freq")
SAVE_EVERY = ("rllm.trainer.save_freq", "trainer.save_freq")
EVAL_BEFORE = ("rllm.trainer.val_before_train", "trainer.val_before_train")
FOLDER = ("training.default_local_dir", "trainer.default_local_dir")
RESUME_FROM = ("training.resume_from_tinker_id", "trainer.resume_from_tinker_id")

MIRRORS = (
    GROUP_SIZE, EVAL_SIZE, BATCH_SIZE, MAX_PROMPT, MAX_RESPONSE, SCHEDULE, WARMUP_RATIO,
    DISABLE_THINKING, ACCUMULATE_REASONING, PARALLEL, ATTEMPTS, ESTIMATOR, GAMMA, LAM,
    CLIPS, CLIP_MIN, CLIP_MAX, NORMALIZE, TEMPERATURE, TOP_P, TOP_K,
    MAX_TOKENS, EVAL_TEMPERATURE, EVAL_TOP_P, EVAL_TOP_K, EVAL_MAX_TOKENS, EPOCHS, LOGGER, PROJECT, NAME, EVAL_EVERY,
    SAVE_EVERY, EVAL_BEFORE, FOLDER, RESUME_FROM,
)  # fmt: skip


class Setting(NamedTuple):
    """A key and its value."""

    key: str
    """The place at which the value stands, or the first place if it is a default."""
    value: Any
    is_set: bool
    """Whether the file or the command line sets the key, to another value than null."""


class Values:
    """The values of a file by dotted key.

    Example: Values(RllmFile()).value("training.group_size") == 16
    """

    def __init__(self, file: Section, overridden: Collection[str] = ()) -> None:
        """`overridden`: the dotted keys that the command line sets."""
        self._file, self._overridden = file, frozenset(overridden)

    def setting(self, *places: str) -> Setting:
        """The setting of a key with these places; the file must have one of them."""
        settings = self._settings(places)
        overridden = [entry for entry in settings if entry.is_set and entry.key in self._overridden]
        return next(iter((*overridden, *(entry for entry in settings if entry.is_set), *settings)))

    def value(self, *places: str) -> Any:
        """The value of a key with these places."""
        return self.setting(*places).value

    def has(self, key: str) -> bool:
        """Whether a file of this kind has the key."""
        return bool(self._settings((key,)))

    def set_keys(self, *keys: str) -> list[str]:
        """Those of the keys that are set."""
        return [entry.key for entry in self._settings(keys) if entry.is_set]

    def conflicts(self) -> Translation:
        """Notes on keys that are set at two places to different values."""
        result = []
        for places in MIRRORS:
            if not self._settings(places):
                continue
            chosen = self.setting(*places)
            result += [
                note(f"{entry.key}: {chosen.key} is set as well, and is used.")
                for entry in self._settings(places)
                if entry.is_set and entry.value != chosen.value
            ]
        return combine(result)

    def _settings(self, places: Sequence[str]) -> list[Setting]:
        return [setting for place in places if (setting := self._at(place)) is not None]

    def _at(self, place: str) -> Setting | None:
        section: Any = self._file
        *parents, name = place.split(".")
        for parent in parents:
            section = section.__dict__.get(parent)
            if not isinstance(section, Section):
                return None
        if name not in type(section).model_fields:
            return None
        value = section.__dict__[name]
        return Setting(place, value, name in section.model_fields_set and value is not None)


def no_effect(keys: Sequence[str], why: str) -> Translation:
    """A note on keys that are set and have no effect in this run; none without keys."""
    return note(f"{', '.join(keys)}: {why}") if keys else NOTHING
