"""How many steps a run takes where its file says how often the data is gone through."""

from __future__ import annotations

from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.sources import listed
from tinsmith.rl.tasks import split


def with_steps(config: RunConfig) -> RunConfig:
    """The same with `steps` counted out: floor(rows x epochs / rows of a step), no more than `steps` if that is set.

    What is left of the last pass and does not fill a step is not trained on. A run of mode train may know no tasks, and
    one of mode bench takes no steps: those say all they need.
    """
    if config.epochs is None or (config.rolls_out and not config.tasks.sources):
        return config
    rows, per_step, what = _rows(config), config.groups_per_step, "groups_per_step"
    if config.experts is not None and not config.rolls_out:
        per_step, what = config.experts.count(per_step, config.group_size, alone=True), "experts.per_step"
    steps = int(rows * config.epochs // per_step)
    if not steps:
        raise ConfigError(
            f"{config.epochs:g} epochs of {rows} are less than one step of {per_step}.", f"Set {what} lower."
        )
    return config.model_copy(update={"steps": min(steps, config.steps or steps)})


def _rows(config: RunConfig) -> int:
    if config.experts is None or config.rolls_out:
        return split(config.tasks, config.seed)[0].size
    return sum(len(source.lessons(config.experts.learn)) for source in listed(config.experts.data))
