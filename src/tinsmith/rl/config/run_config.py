"""RunConfig, the schema of a run file. The settings classes of its sections are defined next to their code.

Example:

    model: {name: HuggingFaceTB/SmolLM2-135M-Instruct, rank: 16}
    tasks: {train: {type: addition}}
    rewards: [{type: closeness}]
    sampling: {max_tokens: 8}
    steps: 60
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails
from typing_extensions import override

from tinsmith.rl import plugin_files
from tinsmith.rl.algorithms.user_code import parts_of_run
from tinsmith.rl.config import other_names
from tinsmith.rl.config.checks import CHECKS
from tinsmith.rl.config.fields import RunSettings
from tinsmith.rl.config.stage_values import check_stages, stage_values, staleness_named
from tinsmith.rl.environments.registry import SECTIONS
from tinsmith.settings import keyed_sentences, paths

OFF_POLICY = {"loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}}
"""The algorithm of a run with staleness whose file sets none: the ratio to the sampling policy must be bounded."""


_STAGE_BEFORE = "tinker://the/stage/before"
"""Stands for the weights that a stage starts from, which are known when the stage before it has ended."""


if TYPE_CHECKING:
    SettingsWithSections = RunSettings
else:
    SettingsWithSections = create_model(
        "SettingsWithSections", __base__=RunSettings, **{name: (kind, kind()) for name, kind in SECTIONS.items()}
    )


class RunConfig(SettingsWithSections):
    """The settings of a run."""

    @classmethod
    @override
    def suggestion(cls, key: str) -> str:
        return other_names.suggestion(key, {name for path in paths(cls) for name in path.split(".")})

    @model_validator(mode="before")
    @classmethod
    def _apply_plugins(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        current = parts_of_run(plugin_files.apply_plugins(staleness_named(values)))
        if current.get("staleness") and "algorithm" not in current:
            current["algorithm"] = OFF_POLICY
        return current

    @classmethod
    @override
    def more_types(cls, values: Mapping[str, Any], key: str) -> Sequence[str]:
        return plugin_files.type_names(values, key)

    @classmethod
    @override
    def origin_of_types(cls, values: Mapping[str, Any], key: str) -> str:
        return plugin_files.origin_of_types(values, key)

    @property
    def runs(self) -> tuple[RunConfig, ...]:
        """The runs to make: those of the stages, or this one."""
        return tuple(self.stage_config(number) for number in range(1, len(self.stages) + 1)) or (self,)

    def stage_config(self, number: int, state: str = _STAGE_BEFORE) -> RunConfig:
        """Settings of stage `number`, counted from 1, as a run that starts from the weights at `state`.

        The first stage and stages of mode bench ignore `state`.
        """
        return RunConfig.model_validate(stage_values(self, number, state))

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        """Check the run, or each stage as the run that it is."""
        if not self.stages:
            for check in CHECKS:
                check(self)
            return self
        check_stages(self)
        stages_of: dict[tuple[str, str], list[str]] = {}
        for number, stage in enumerate(self.stages, 1):
            for key, text in self._stage_faults(number):
                stages_of.setdefault((key, text), []).append(stage.name)
        if stages_of:
            faults = [_fault(key, text, stages) for (key, text), stages in stages_of.items()]
            raise ValidationError.from_exception_data("RunConfig", faults)
        return self

    def _stage_faults(self, number: int) -> list[tuple[str, str]]:
        """The faults of a stage: its own key, or none, and what is wrong."""
        own, values = self.stages[number - 1].model_extra or {}, {}
        try:
            values = stage_values(self, number, _STAGE_BEFORE)
            RunConfig.model_validate(values)
        except ValidationError as error:
            faults = keyed_sentences(RunConfig, error, values)
        except ValueError as error:
            return [("", str(error))]
        else:
            return []
        return [
            (f"stages.{number - 1}.{key}", sentence.removeprefix(f"'{key}'").lstrip(": "))
            if key.partition(".")[0] in own
            else ("", sentence)
            for key, sentence in faults
        ]


def _fault(key: str, text: str, stages: Sequence[str]) -> InitErrorDetails:
    """A fault at a key of a stage, or else of these stages."""
    message = text if key else f"{'stage' if len(stages) == 1 else 'stages'} {' and '.join(stages)}: {text}"
    place = tuple(key.split(".")) if key else ()
    return InitErrorDetails(type="value_error", loc=place, input=None, ctx={"error": ValueError(message)})
