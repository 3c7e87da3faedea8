"""In what order training tasks come: a lane for each source, which says which row its next draw is.

All lanes but `difficulty` are functions of the seed and the number of the draw, so a run that goes on needs to know
only how many draws there were. `difficulty` also remembers what the run has told it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from tinsmith.errors import ConfigError
from tinsmith.settings import Settings, unread

Feature = Callable[[str], np.ndarray]
"""From a field's name to float64 [M], its value in every row of the source."""


class RowOrder(Protocol):
    """One source's rows in their order."""

    def pick(self, draw: int, taken: Collection[int]) -> int:
        """The row of draw number `draw`, from 0; `taken` are rows already in the batch, for orders that look."""
        ...

    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """The mean rewards of tasks that were tried."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on must know beside the number of draws; plain JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """As it was."""
        ...


@dataclass
class EpochOrder:
    """Rows in the order that `of_epoch` gives for each pass over them."""

    of_epoch: Callable[[int], np.ndarray]
    length: int
    state: dict[str, Any]
    _now: tuple[int, np.ndarray] | None = None

    def pick(self, draw: int, taken: Collection[int]) -> int:
        """Epochs follow each other without a gap."""
        epoch, place = divmod(draw, self.length)
        if self._now is None or self._now[0] != epoch:
            self._now = (epoch, self.of_epoch(epoch))
        return int(self._now[1][place])

    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Does not count."""

    def restore(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""


class Sequential(Settings):
    """As the rows stand."""

    type: Literal["sequential"] = "sequential"

    def row_order(self, rows: np.ndarray, feature: Feature, seed: tuple[int, ...]) -> RowOrder:
        """Of one source."""
        return EpochOrder(lambda _: rows, len(rows), {})


class Shuffle(Settings):
    """Every row once in each epoch, in another order each time."""

    type: Literal["shuffle"] = "shuffle"

    def row_order(self, rows: np.ndarray, feature: Feature, seed: tuple[int, ...]) -> RowOrder:
        """Of one source."""
        first, *others = seed
        return EpochOrder(lambda epoch: np.random.default_rng((first, epoch, *others)).permutation(rows), len(rows), {})


class Random(Settings):
    """Rows drawn at random, each time from all of them; none twice in a batch."""

    type: Literal["random"] = "random"

    def row_order(self, rows: np.ndarray, feature: Feature, seed: tuple[int, ...]) -> RowOrder:
        """Of one source."""
        return RandomOrder(rows, seed)


class EasyToHard(Settings):
    """Sorted by fields of the rows; each epoch again from the easiest."""

    type: Literal["easy_to_hard"] = "easy_to_hard"
    by: tuple[str, ...] = Field(min_length=1)
    """Fields that hold numbers; later ones decide where earlier ones are equal."""
    descending: bool = False
    """Largest first."""

    def row_order(self, rows: np.ndarray, feature: Feature, seed: tuple[int, ...]) -> RowOrder:
        """Of one source."""
        keys = [feature(key)[rows] * (-1.0 if self.descending else 1.0) for key in self.by]
        sorted_rows = rows[np.lexsort(keys[::-1])]
        return EpochOrder(lambda _: sorted_rows, len(rows), {})


class Difficulty(Settings):
    """Tasks whose expected reward is nearest a target are the likeliest, by a belief Beta(alpha, beta) about each.

    A task tried with mean reward r: alpha = (1 - lamb) alpha + m r and beta = (1 - lamb) beta + m (1 - r). With two
    fields `by`, what a weak and a strong model get, every other task moves too: the rewards of the tasks tried say how
    far between the two the policy stands, so p is guessed for all, and its belief takes rho m p and rho m (1 - p).
    """

    type: Literal["difficulty"] = "difficulty"
    by: tuple[str, str] | None = None
    """Fields with the mean reward, 0 to 1, that a weak and a strong model get on the row."""
    m: float = Field(default=16.0, gt=0)
    """How many tries one report counts for."""
    lamb: float = Field(default=0.2, ge=0, le=1)
    """How much is forgotten at each report."""
    rho: float = Field(default=0.2, ge=0)
    """How much guesses count, with `by`."""
    target_reward: float = Field(default=1.0, ge=0, le=1)
    """The expected reward to look for."""
    tau: float = Field(default=1.0, ge=0)
    """Temperature of the draw: exp(-|target - expected| / tau); 0 takes the nearest."""
    sample: bool = False
    """Draw the expected reward from the belief, in place of its mean."""

    @model_validator(mode="after")
    def _read_together(self) -> Difficulty:
        if self.by is None:
            unread(self, "rho", without="by")
        return self

    def row_order(self, rows: np.ndarray, feature: Feature, seed: tuple[int, ...]) -> RowOrder:
        """Of one source."""
        known = None if self.by is None else np.stack([feature(key)[rows] for key in self.by])
        if known is not None and not ((known >= 0) & (known <= 1)).all():
            raise ConfigError(f"tasks.order.by: {self.by} hold numbers outside of 0 to 1.", "Name fields with shares.")
        return DifficultyOrder(self, rows, known, seed)


OrderConfig = Annotated[
    Sequential | Shuffle | Random | EasyToHard | Difficulty,
    Field(discriminator="type"),
]


@dataclass
class RandomOrder:
    """Rows by chance, each as likely; none twice in a batch while others are left."""

    rows: np.ndarray
    seed: tuple[int, ...]

    def pick(self, draw: int, taken: Collection[int]) -> int:
        """By the seed and the number of the draw."""
        random = np.random.default_rng((*self.seed, draw))
        while True:
            row = int(self.rows[random.integers(len(self.rows))])
            if row not in taken or len(taken) >= len(self.rows):
                return row

    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Does not count."""

    @property
    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""


class DifficultyOrder:
    """What is believed of each row's reward, and draws by it."""

    def __init__(self, config: Difficulty, rows: np.ndarray, known: np.ndarray | None, seed: tuple[int, ...]) -> None:
        """`known` float64 [2, M]: what a weak and a strong model get."""
        self._config, self._rows, self._known, self._seed = config, rows, known, seed
        guess = 0.0 if known is None else config.rho * config.m * known.mean(axis=0)
        other = 0.0 if known is None else config.rho * config.m * (1 - known.mean(axis=0))
        self.alpha = np.ones(len(rows)) + guess
        self.beta = np.ones(len(rows)) + other

    def pick(self, draw: int, taken: Collection[int]) -> int:
        """By closeness to the target; of equal ones the first, or by chance where `tau` is not 0."""
        random = np.random.default_rng((*self._seed, draw))
        expected = random.beta(self.alpha, self.beta) if self._config.sample else self.alpha / (self.alpha + self.beta)
        scores = -np.abs(self._config.target_reward - expected)
        if self._config.tau:  # the largest of log chances with Gumbel noise is a draw by those chances
            scores = scores / self._config.tau + random.gumbel(size=len(scores))
        if 0 < len(taken) < len(self._rows):
            scores[np.searchsorted(self._rows, list(taken))] = -np.inf
        return int(self._rows[int(np.argmax(scores))])

    def update(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Moves the beliefs, all rows of a batch at once."""
        if not rows:
            return
        places, rates_ = np.searchsorted(self._rows, rows), np.asarray(rates, np.float64)
        m, rho = self._config.m, self._config.rho
        before = self.alpha.copy(), self.beta.copy()
        if self._known is not None:
            weak, strong = self._known
            span = float((strong[places] - weak[places]).mean())
            share = float((rates_ - weak[places]).mean()) / span if span else 0.0
            guess = np.clip(weak + share * (strong - weak), 0.0, 1.0)
            self.alpha = (1 - self._config.lamb) * self.alpha + rho * m * guess
            self.beta = (1 - self._config.lamb) * self.beta + rho * m * (1 - guess)
        for place in np.unique(places):
            rate = float(rates_[places == place].mean())
            self.alpha[place] = (1 - self._config.lamb) * before[0][place] + m * rate
            self.beta[place] = (1 - self._config.lamb) * before[1][place] + m * (1 - rate)

    @property
    def state(self) -> dict[str, Any]:
        """Both numbers of every row."""
        return {"alpha": self.alpha.tolist(), "beta": self.beta.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """As they were."""
        if state:
            self.alpha, self.beta = np.array(state["alpha"]), np.array(state["beta"])
