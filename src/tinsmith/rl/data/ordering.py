"""Order of training tasks: which row of a source comes next.

Every order except `difficulty` and `custom` is a function of the seed and the number of the draw, so a resumed run only
needs the number of draws. These two also keep what they have learned from rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.plugins import CustomPart, Kind
from tinsmith.settings import Needs, Settings

Feature = Callable[[str], np.ndarray]
"""Maps a field name to float64 [M]: the field's value in every row of the source."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """Tasks or demonstrations of one source, and its numbers by the name of a field, which an order may sort by."""

    tasks: Sequence[Any]
    feature: Feature


class RowOrder(Protocol):
    """Order of the rows of one source."""

    learns: ClassVar[bool]
    """Whether the order depends on rewards."""

    def pick(self, draw: int, taken: Collection[int]) -> int:
        """Row of draw number `draw`, counted from 0. `taken` holds the rows already in the batch."""
        ...

    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Learn from the mean rewards of rows that were rolled out."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """State beyond the number of draws, as plain JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Load a saved `state`."""
        ...


class FixedOrder(RowOrder, Protocol):
    """An order that depends on the seed and the number of the draw alone."""

    learns = False

    @override
    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Rewards do not change this order."""

    @property
    @override
    def state(self) -> dict[str, Any]:
        return {}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        """There is no state."""


@dataclass
class EpochOrder(FixedOrder):
    """Rows in the order that `rows_of_epoch` returns for each pass; passes follow each other without a gap."""

    rows_of_epoch: Callable[[int], np.ndarray]
    length: int
    _current: tuple[int, np.ndarray] | None = None

    @override
    def pick(self, draw: int, taken: Collection[int]) -> int:
        epoch, place = divmod(draw, self.length)
        if self._current is None or self._current[0] != epoch:
            self._current = (epoch, self.rows_of_epoch(epoch))
        return int(self._current[1][place])


class Sequential(Settings):
    """Rows in the order of the data."""

    type: Literal["sequential"] = "sequential"

    def row_order(self, rows: np.ndarray, data: LoadedSource, seed: tuple[int, ...]) -> RowOrder:
        """Order of one source."""
        return EpochOrder(lambda _: rows, len(rows))


class Shuffle(Settings):
    """Every row once per epoch, in a different order each epoch."""

    type: Literal["shuffle"] = "shuffle"

    def row_order(self, rows: np.ndarray, data: LoadedSource, seed: tuple[int, ...]) -> RowOrder:
        """Order of one source."""
        first, *others = seed
        return EpochOrder(lambda epoch: np.random.default_rng((first, epoch, *others)).permutation(rows), len(rows))


class Random(Settings):
    """Rows drawn at random with replacement, but none twice in a batch."""

    type: Literal["random"] = "random"

    def row_order(self, rows: np.ndarray, data: LoadedSource, seed: tuple[int, ...]) -> RowOrder:
        """Order of one source."""
        return RandomOrder(rows, seed)


class EasyToHard(Settings):
    """Rows sorted by fields; every epoch starts again with the easiest."""

    type: Literal["easy_to_hard"] = "easy_to_hard"
    by: tuple[str, ...] = Field(min_length=1)
    """Numeric fields to sort by; later fields break ties."""
    descending: bool = False
    """Largest values first."""

    def row_order(self, rows: np.ndarray, data: LoadedSource, seed: tuple[int, ...]) -> RowOrder:
        """Order of one source."""
        keys = [data.feature(key)[rows] * (-1.0 if self.descending else 1.0) for key in self.by]
        sorted_rows = rows[np.lexsort(keys[::-1])]
        return EpochOrder(lambda _: sorted_rows, len(rows))


class Difficulty(Settings):
    """Prefer tasks whose expected reward is nearest a target, by a belief Beta(alpha, beta) about each task.

    A task rolled out with mean reward r updates its belief: alpha = (1 - lamb) alpha + m r and
    beta = (1 - lamb) beta + m (1 - r). With two fields `by` (the rewards of a weak and a strong model), all other tasks
    are updated too: the observed rewards place the policy between the two models, which gives an estimate p for every
    task, and its belief receives rho m p and rho m (1 - p).
    """

    type: Literal["difficulty"] = "difficulty"
    by: tuple[str, str] | None = None
    """Fields with the mean reward, 0 to 1, of a weak and of a strong model on the row."""
    m: float = Field(default=16.0, gt=0)
    """Number of observations that one update counts as."""
    lamb: float = Field(default=0.2, ge=0, le=1)
    """Share of the old belief that each update discards."""
    rho: Annotated[float, Needs("by")] = Field(default=0.2, ge=0)
    """Weight of the estimates for tasks that were not rolled out; used with `by`."""
    target_reward: float = Field(default=1.0, ge=0, le=1)
    """Expected reward to prefer."""
    tau: float = Field(default=1.0, ge=0)
    """Temperature of the draw, exp(-|target - expected| / tau); 0 takes the nearest task."""
    sample: bool = False
    """Draw the expected reward from the belief instead of using its mean."""

    def row_order(self, rows: np.ndarray, data: LoadedSource, seed: tuple[int, ...]) -> RowOrder:
        """Order of one source."""
        rates = None if self.by is None else np.stack([data.feature(key)[rows] for key in self.by])
        if rates is not None and not ((rates >= 0) & (rates <= 1)).all():
            raise ConfigError(
                f"tasks.order.by: {self.by} have values outside 0 to 1.", "Name fields that hold mean rewards."
            )
        return DifficultyOrder(self, rows, rates, seed)


class CustomOrder(CustomPart):
    """User code: a function that orders the tasks of an epoch.

    Its parameters are chosen by name among `tasks` (those of the source that are trained on), `epoch` (from 0),
    `random` (a NumPy generator of the epoch) and `rewards` (float64 [M]: the mean reward of each task when it was last
    rolled out, nan before); others are its arguments. It returns the numbers of the M tasks in their order, [M].

    Example: def shortest_first(tasks): return sorted(range(len(tasks)), key=lambda at: len(tasks[at].answer))
    """

    kind: ClassVar[Kind] = "order"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        _ = self.function

    @cached_property
    def function(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """The function and what it takes. Raises ValueError if the path or the arguments are wrong."""
        return self.function_of(named=("tasks", "epoch", "random", "rewards"))

    def row_order(self, rows: np.ndarray, data: LoadedSource, seed: tuple[int, ...]) -> RowOrder:
        """Order of one source."""
        return UserOrder(self, rows, data.tasks, seed)


OrderConfig = Annotated[
    Sequential | Shuffle | Random | EasyToHard | Difficulty | CustomOrder,
    Field(discriminator="type"),
]


class UserOrder(RowOrder):
    """The order of a user's function, which is called as an epoch begins."""

    learns = True

    def __init__(self, config: CustomOrder, rows: np.ndarray, tasks: Sequence[Any], seed: tuple[int, ...]) -> None:
        self._config, self._rows, self._seed = config, rows, seed
        self._tasks = LazySequence(len(rows), lambda at: tasks[int(rows[at])])
        self._rewards = np.full(len(rows), np.nan)
        self._epoch = (0, self._ordered(0))  # so that a fault is reported before the run begins

    def _ordered(self, epoch: int) -> list[int]:
        function, taken = self._config.function
        random = np.random.default_rng((self._seed[0], epoch, *self._seed[1:]))
        values = {"tasks": self._tasks, "epoch": epoch, "random": random, "rewards": self._rewards.copy()}
        returned = function(**{name: values[name] for name in taken})
        with self._config.errors_named():
            order = np.asarray(list(returned))
        count = len(self._rows)
        if order.shape != (count,) or order.dtype.kind not in "iu" or not ((order >= 0) & (order < count)).all():
            raise self._config.fault(
                f"returned {order.tolist()!r:.80} for {counted(count, 'task')}",
                f"Return {counted(count, 'number')} from 0 to {count - 1}, in the order of the tasks.",
            )
        return order.tolist()

    @override
    def pick(self, draw: int, taken: Collection[int]) -> int:
        epoch, place = divmod(draw, len(self._rows))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._ordered(epoch))
        return int(self._rows[self._epoch[1][place]])

    @override
    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        self._rewards[np.searchsorted(self._rows, rows)] = rates

    @property
    @override
    def state(self) -> dict[str, Any]:
        """The order of this epoch, and the last mean reward of each task that was rolled out."""
        measured = np.flatnonzero(~np.isnan(self._rewards))
        return {
            "epoch": self._epoch[0],
            "order": self._epoch[1],
            "rewards": {str(at): float(self._rewards[at]) for at in measured},
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self._epoch = (state["epoch"], state["order"])
            for at, reward in state["rewards"].items():
                self._rewards[int(at)] = reward


@dataclass
class RandomOrder(FixedOrder):
    """Rows drawn uniformly; none twice in a batch unless the batch holds every row."""

    rows: np.ndarray
    seed: tuple[int, ...]

    @override
    def pick(self, draw: int, taken: Collection[int]) -> int:
        random = np.random.default_rng((*self.seed, draw))
        while True:
            row = int(self.rows[random.integers(len(self.rows))])
            if row not in taken or len(taken) >= len(self.rows):
                return row


class DifficultyOrder(RowOrder):
    """Beliefs about the reward of each row, and draws by them."""

    learns = True

    def __init__(
        self, config: Difficulty, rows: np.ndarray, model_rates: np.ndarray | None, seed: tuple[int, ...]
    ) -> None:
        """`model_rates` float64 [2, M]: mean rewards of a weak and of a strong model."""
        self._config, self._rows, self._model_rates, self._seed = config, rows, model_rates, seed
        successes = 0.0 if model_rates is None else config.rho * config.m * model_rates.mean(axis=0)
        failures = 0.0 if model_rates is None else config.rho * config.m * (1 - model_rates.mean(axis=0))
        self.alpha = np.ones(len(rows)) + successes
        self.beta = np.ones(len(rows)) + failures

    @override
    def pick(self, draw: int, taken: Collection[int]) -> int:
        """Row nearest the target; ties go to the first row, or to chance if `tau` is positive."""
        random = np.random.default_rng((*self._seed, draw))
        expected = random.beta(self.alpha, self.beta) if self._config.sample else self.alpha / (self.alpha + self.beta)
        scores = -np.abs(self._config.target_reward - expected)
        if self._config.tau:  # argmax of log probabilities with Gumbel noise is a draw from those probabilities
            scores = scores / self._config.tau + random.gumbel(size=len(scores))
        if 0 < len(taken) < len(self._rows):
            scores[np.searchsorted(self._rows, list(taken))] = -np.inf
        return int(self._rows[int(np.argmax(scores))])

    @override
    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Update the beliefs by all rows of a batch at once."""
        if not rows:
            return
        places, observed = np.searchsorted(self._rows, rows), np.asarray(rates, np.float64)
        m, rho = self._config.m, self._config.rho
        before = self.alpha.copy(), self.beta.copy()
        if self._model_rates is not None:
            weak, strong = self._model_rates
            span = float((strong[places] - weak[places]).mean())
            share = float((observed - weak[places]).mean()) / span if span else 0.0
            estimate = np.clip(weak + share * (strong - weak), 0.0, 1.0)
            self.alpha = (1 - self._config.lamb) * self.alpha + rho * m * estimate
            self.beta = (1 - self._config.lamb) * self.beta + rho * m * (1 - estimate)
        for place in np.unique(places):
            rate = float(observed[places == place].mean())
            self.alpha[place] = (1 - self._config.lamb) * before[0][place] + m * rate
            self.beta[place] = (1 - self._config.lamb) * before[1][place] + m * (1 - rate)

    @property
    @override
    def state(self) -> dict[str, Any]:
        """Alpha and beta of every row."""
        return {"alpha": self.alpha.tolist(), "beta": self.beta.tolist()}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self.alpha, self.beta = np.array(state["alpha"]), np.array(state["beta"])
