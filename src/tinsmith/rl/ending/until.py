"""Conditions that end a run, or a stage of it, before its last step. The final weights are saved as after that step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.plurals import counted
from tinsmith.rl.ending.duration import Duration
from tinsmith.settings import Needs, Settings, did_you_mean


class UntilConfig(Settings):
    """End before the last step, at the first of these conditions that holds after a step."""

    metric: str = ""
    """Metric to watch, such as eval/pass@1 or reward/mean (docs/reference/metrics.md)."""
    at_least: Annotated[float | None, Needs("metric")] = None
    """End when the metric is at least this."""
    at_most: Annotated[float | None, Needs("metric")] = None
    """End when the metric is at most this."""
    patience: Annotated[int, Needs("metric")] = Field(default=0, ge=0)
    """End also when this many values in a row are no better than the best one before them. 0: do not."""
    better: Annotated[Literal["higher", "lower"] | None, Needs("patience")] = None
    """Whether higher or lower values are better for `patience`. Not set: lower with at_most, else higher."""
    time_limit: Duration | None = None
    """End after this time, in seconds or as in 1h30m. The time of a run that was stopped and resumed is added up. The
    step in progress is finished first."""

    @model_validator(mode="after")
    def _check_conditions(self) -> UntilConfig:
        if self.metric and self.at_least is not None and self.at_most is not None:
            raise ValueError("at_least and at_most are two bounds; set one of them")
        if self.metric and self.at_least is None and self.at_most is None and not self.patience:
            raise ValueError("metric needs a condition; set at_least, at_most or patience")
        if self.better is not None and (self.at_least, self.at_most)[self.better == "higher"] is not None:
            bound = "at_most" if self.better == "higher" else "at_least"
            raise ValueError(f"better: {self.better} contradicts {bound}; leave out one of them")
        if not self.metric and self.time_limit is None:
            raise ValueError("there is no condition; set metric with at_least, at_most or patience, or time_limit")
        return self

    @property
    def higher_is_better(self) -> bool:
        """The direction that `patience` counts by."""
        return self.better == "higher" if self.better else self.at_most is None


class EndCondition:
    """Follows the metrics of a run, and says whether it ends."""

    def __init__(
        self, config: UntilConfig | None, state: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`state` is that of a checkpoint, or empty."""
        self._config, self._clock, self._start = config, clock, clock()
        self._seconds = state.get("seconds", 0.0)
        self._value, self._best = state.get("value", math.nan), state.get("best", math.nan)
        self._worse = int(state.get("worse", 0))
        self._measured = int(state.get("measured", 0))
        self._names: set[str] = set()
        self._ended = "a callback ended it" if state.get("ended") else ""

    def observe(self, values: Mapping[str, float]) -> None:
        """Report the metrics of a step."""
        config = self._config
        if config is None or not config.metric:
            return
        self._names |= values.keys()
        if config.metric not in values:
            return
        self._measured += 1
        value = values[config.metric]
        if math.isnan(value):
            return
        self._value = value
        sign = 1.0 if config.higher_is_better else -1.0
        if math.isnan(self._best) or sign * value > sign * self._best:
            self._best, self._worse = value, 0
        else:
            self._worse += 1

    def end(self, reason: str) -> None:
        """End the run for a reason; an empty one changes nothing."""
        self._ended = self._ended or reason

    @property
    def reason(self) -> str:
        """Why the run ends; empty if it goes on."""
        config = self._config
        if self._ended:
            return self._ended
        if config is None:
            return ""
        if config.at_least is not None and self._value >= config.at_least:
            return f"{config.metric} is {self._value:.4g}, at least {config.at_least:g}"
        if config.at_most is not None and self._value <= config.at_most:
            return f"{config.metric} is {self._value:.4g}, at most {config.at_most:g}"
        if config.patience and self._worse >= config.patience:
            return f"{config.metric} has not been better than {self._best:.4g} for {self._worse} values"
        if config.time_limit is not None and self._elapsed >= config.time_limit:
            return f"its time limit of {counted(config.time_limit, 'second')} is over"
        return ""

    @property
    def fault(self) -> str:
        """Why the conditions could not hold so far: the metric had no value, or none that is a number; else empty."""
        metric = self._config.metric if self._config is not None else ""
        if not metric or not math.isnan(self._value):
            return ""
        if self._measured:
            return f"until.metric: {metric} was never a number, so the run could not end by it"
        suggestion = did_you_mean(metric, sorted(self._names)) or "docs/reference/metrics.md lists the metrics"
        return f"until.metric: {metric} was never measured. {suggestion}"

    @property
    def state(self) -> dict[str, float]:
        """State for a checkpoint; empty without conditions, in a run that goes on."""
        ended = {"ended": 1.0} if self._ended else {}
        if self._config is None:
            return ended
        values = {
            "seconds": self._elapsed,
            "value": self._value,
            "best": self._best,
            "worse": float(self._worse),
            "measured": float(self._measured),
        }
        return {name: value for name, value in values.items() if not math.isnan(value)} | ended

    @property
    def _elapsed(self) -> float:
        return self._seconds + self._clock() - self._start
