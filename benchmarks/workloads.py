"""What is trained on and sampled from: token rows of real text lengths, the same for both sides, from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import Datum, Pass

VOCABULARY = 49_152


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows [prompt + answer] and how long each one's prompt is."""

    name: str
    rows: list[np.ndarray]
    prompts: list[int]

    @property
    def tokens(self) -> int:
        """Positions that are scored; padding is not counted."""
        return sum(len(row) - 1 for row in self.rows)

    def as_pass(self, model_id: str) -> Pass:
        """The same work as a request of the engine."""
        data = []
        for row, prompt in zip(self.rows, self.prompts, strict=True):
            advantages = np.zeros(len(row) - 1, dtype=np.float32)
            advantages[prompt - 1 :] = 0.5
            inputs = {"advantages": advantages, "logprobs": np.full(len(row) - 1, -6.0, np.float32) * (advantages != 0)}
            data.append(Datum(tokens=row[:-1].astype(np.int32), targets=row[1:].astype(np.int64), inputs=inputs))
        return Pass(model_id=model_id, data=tuple(data), loss_fn="importance_sampling")


def groups(seed: int = 0, prompts: int = 4, answers: int = 8) -> Batch:
    """RL: groups of answers to one prompt; prompts of 40 to 160 tokens, answers of 8 to 64."""
    draw = np.random.default_rng(seed)
    rows, lengths = [], []
    for _ in range(prompts):
        prompt = draw.integers(3, VOCABULARY, int(draw.integers(40, 161)))
        for _ in range(answers):
            rows.append(np.concatenate([prompt, draw.integers(3, VOCABULARY, int(draw.integers(8, 65)))]))
            lengths.append(len(prompt))
    return Batch(name="groups of 8 answers to a prompt", rows=rows, prompts=lengths)


def separate(seed: int = 0, rows: int = 16) -> Batch:
    """Fine-tuning: rows that share nothing, of 20 to 300 tokens, in no order."""
    draw = np.random.default_rng(seed)
    made = [draw.integers(3, VOCABULARY, int(length)) for length in draw.integers(20, 301, rows)]
    return Batch(name="rows that share nothing", rows=made, prompts=[1 + len(row) // 3 for row in made])


def questions(seed: int = 0, count: int = 8) -> list[np.ndarray]:
    """Prompts of 40 to 160 tokens to sample from."""
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCABULARY, int(draw.integers(40, 161))).astype(np.int32) for _ in range(count)]
