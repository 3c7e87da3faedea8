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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import create_model, model_validator
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl import plugins
from tinsmith.rl.algorithms.config import DATA_ONLY
from tinsmith.rl.config import other_names
from tinsmith.rl.config.checks import CHECKS
from tinsmith.rl.config.fields import ROLLOUTS, RunSettings, Stage
from tinsmith.rl.environments.registry import SECTIONS
from tinsmith.rl.record.layout import Layout
from tinsmith.settings import build, explicit_values, paths

_TASKS = ("tasks", "workflow", "rewards")
"""Keys that environments replace."""
_OF_THE_RUN = ("model", "service", "stages", "folder", "resume", "resume_from", "time_limit", "grace_period")
"""Keys that a stage cannot set."""

OFF_POLICY = {"loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}}
"""The algorithm of a run with staleness whose file sets none: the ratio to the sampling policy must be bounded."""


def _check_kept_optimizers(stages: Sequence[Stage], modes: Sequence[str]) -> None:
    """Raises ValueError for a stage with keep_optimizer that no training stage precedes."""
    trains = [mode != "bench" for mode in modes]
    for at, stage in enumerate(stages):
        if stage.keep_optimizer and not (trains[at] and any(trains[:at])):
            why = "no stage trains before it" if trains[at] else "mode bench trains nothing"
            raise ValueError(f"stage {stage.name}: {why}, so there is no optimizer to keep; leave out keep_optimizer")


def _inherited(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The run's keys that a stage with the keys `own` inherits: without keys of rollouts if the stage samples none, and
    without tasks if it has environments or the reverse."""
    algorithm = own.get("algorithm", values.get("algorithm"))
    kind = algorithm.get("type") if isinstance(algorithm, Mapping) else None
    replaced = _TASKS if "environments" in own else ("environments",) if own.keys() & set(_TASKS) else ()
    values = {name: part for name, part in values.items() if name not in replaced}
    if kind not in DATA_ONLY:
        return values
    fields = RunSettings.model_fields
    return {name: part for name, part in values.items() if ROLLOUTS not in fields[name].metadata}


def _own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the other name of `staleness` replaced."""
    own = dict(values)
    if "max_steps_off_policy" in own:
        if "staleness" in own:
            raise ValueError("staleness and max_steps_off_policy are two names of one key; leave out one of them")
        own["staleness"] = own.pop("max_steps_off_policy")
    return own


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
        current = plugins.apply_plugins(_own_names(values))
        if current.get("staleness") and "algorithm" not in current:
            current["algorithm"] = OFF_POLICY
        return current

    @classmethod
    @override
    def more_types(cls, values: Mapping[str, Any], key: str) -> Sequence[str]:
        return plugins.type_names(values, key)

    @model_validator(mode="after")
    def _check_stages(self) -> RunConfig:
        names = [stage.name for stage in self.stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {twice[0]}; give each a name of its own")
        modes = [self.stage_config(number).mode for number in range(1, len(self.stages) + 1)]
        if modes and set(modes) == {"bench"}:
            raise ValueError("no stage trains; take mode bench for the whole run, without stages")
        _check_kept_optimizers(self.stages, modes)
        return self

    def stage_config(self, number: int, state: str = "tinker://the/stage/before") -> RunConfig:
        """Settings of stage `number`, counted from 1, as a run that starts from the weights at `state`.

        The first stage and stages of mode bench ignore `state`. Raises ConfigError that names the stage.
        """
        stage, own = self.stages[number - 1], _own_names(self.stages[number - 1].model_extra or {})
        if fixed := sorted(own.keys() & set(_OF_THE_RUN)):
            raise ConfigError(
                f"stage {stage.name}: {fixed[0]} cannot differ between stages.",
                f"Set {fixed[0]} outside of stages"
                f"{'; until.time_limit ends a stage' if fixed[0] == 'time_limit' else ''}.",
            )
        if own.get("mode") == "explore":
            raise ConfigError(
                f"stage {stage.name}: mode explore needs a second process that trains, which a stage cannot be.",
                "Leave out mode to sample and train, or run the stage's settings as a run of its own.",
            )
        values = {
            name: part
            for name, part in explicit_values(self).items()
            if name not in ("stages", "name", "time_limit", "until" if own.get("mode") == "bench" else "")
        }
        if own.keys() & {"steps", "epochs"}:
            values = {name: part for name, part in values.items() if name not in ("steps", "epochs")}
        if number > 1 and state and own.get("mode") != "bench":
            shape = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
            model = {name: part for name, part in values["model"].items() if name not in shape}
            values["model"] = {**model, "load_from": state}
        values["folder"] = str(Layout(Path(self.folder or f"runs/{self.name}")).stage(number, stage.name))
        values["name"] = f"{self.name} {stage.name}".strip()
        return build(RunConfig, {**_inherited(values, own), **own}, f"stage {stage.name}")

    @model_validator(mode="after")
    def _check_sections(self) -> RunConfig:
        for check in CHECKS:
            check(self)
        return self
