"""Workloads: token rows of realistic lengths from a seed, the same for both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import Datum, Pass

VOCABULARY = 500
"""Ids that every model has, the smallest of the tests too; the work does not depend on which they are."""
PROMPT = 150
ANSWER = (40, 160)
GROUPS, GROUP = 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows [prompt + answer], and the length of each prompt."""

    name: str
    rows: list[np.ndarray]
    prompts: list[int]
    turns: tuple[int, int] | None = None
    """Lengths (said, answered) of the turns that the rows consist of: what is answered after the prompt is trained.
    None: all that comes after the prompt."""

    @property
    def tokens(self) -> int:
        """Positions that are scored, as a user counts them: a shared prompt in every row, padding nowhere."""
        return sum(len(row) - 1 for row in self.rows)

    def advantages(self, index: int) -> np.ndarray:
        """float32 [N]: of each target of a row, 0 where it is not trained."""
        targets = np.arange(1, len(self.rows[index]))
        trained = targets >= self.prompts[index]
        if self.turns is not None:
            said, answered = self.turns
            trained &= targets % (said + answered) >= said
        return np.where(trained, np.float32(0.5), np.float32(0))

    def as_pass(self, model_id: str) -> Pass:
        """The same work as a request of the engine."""
        data = []
        for index, row in enumerate(self.rows):
            advantages = self.advantages(index)
            inputs = {"advantages": advantages, "logprobs": np.full(len(row) - 1, -6.0, np.float32) * (advantages != 0)}
            data.append(Datum(tokens=row[:-1].astype(np.int32), targets=row[1:].astype(np.int64), inputs=inputs))
        return Pass(model_id=model_id, data=tuple(data), loss_fn="importance_sampling")


def grpo(seed: int = 0, *, shared: bool = True, groups: int = GROUPS, group: int = GROUP) -> Batch:
    """`groups` prompts of 150 tokens with `group` answers of 40 to 160; or as many rows, each with its own prompt.

    The lengths are the same either way, so a side that shares nothing does the same work on both.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        prompt = _tokens(draw, PROMPT)
        for _ in range(group):
            answer = _tokens(draw, int(draw.integers(ANSWER[0], ANSWER[1] + 1)))
            own = prompt if shared else _tokens(np.random.default_rng(1000 + len(rows)), PROMPT)
            rows.append(np.concatenate([own, answer]))
    name = f"{groups} prompts of {PROMPT} tokens x {group} answers" if shared else f"{len(rows)} different prompts"
    return Batch(name=name, rows=rows, prompts=[PROMPT] * len(rows))


def rows_of(length: int, count: int, seed: int = 0) -> Batch:
    """`count` rows that share nothing and score `length` positions each, half of them prompt."""
    draw = np.random.default_rng(seed)
    rows = [_tokens(draw, length + 1) for _ in range(count)]
    return Batch(name=f"{count} x {length}", rows=rows, prompts=[1 + length // 2] * count)


def tree(
    seed: int = 0, *, leaves: int = 20, depth: int = 10, turns: tuple[int, int] = (24, 26), by_turn: bool = False
) -> Batch:
    """Conversations of `depth` turns; each forks from an earlier one after a random turn of the tree.

    A row is a whole conversation, whose answers are trained; or, `by_turn`, there is a row for each answer, after all
    that was said before it, as an agent's requests are recorded. Rows come by length, so that little is padded.
    """
    draw = np.random.default_rng(seed)
    turn = sum(turns)
    rows = [_tokens(draw, depth * turn)]
    forks = [(0, at) for at in range(1, depth)]
    while len(rows) < leaves:
        parent, at = forks[int(draw.integers(len(forks)))]
        forks += [(len(rows), later) for later in range(at + 1, depth)]
        rows.append(np.concatenate([rows[parent][: at * turn], _tokens(draw, (depth - at) * turn)]))
    if not by_turn:
        return Batch(name="a row for each leaf", rows=rows, prompts=[turns[0]] * leaves, turns=turns)
    ends = {row[:stop].tobytes(): row[:stop] for row in rows for stop in range(turn, len(row) + 1, turn)}
    by_length = sorted(ends.values(), key=len)
    prompts = [len(row) - turns[1] for row in by_length]
    return Batch(name="a row for each answer", rows=by_length, prompts=prompts, turns=turns)


def questions(count: int = 8, length: int = PROMPT, seed: int = 0) -> list[np.ndarray]:
    """Prompts to sample from."""
    draw = np.random.default_rng(seed)
    return [_tokens(draw, length).astype(np.int32) for _ in range(count)]


def _tokens(draw: np.random.Generator, length: int) -> np.ndarray:
    return draw.integers(3, VOCABULARY, length)
