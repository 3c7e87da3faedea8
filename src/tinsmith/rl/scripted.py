"""A policy in arithmetic, for tests without a server: it says one of a few fixed replies, and learns which.

Logits over replies are the weights; `update` takes an exact policy-gradient step on them, so rewards rise as in a real
run, and `save` writes them to a folder, so runs resume. A token is a character's code point; 0 ends a reply. It knows
no loss but importance_sampling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tinsmith.errors import Unsupported
from tinsmith.rl.policy import Loss, OptimizerConfig, SamplingConfig, Updated
from tinsmith.rl.samples import Sample
from tinsmith.rl.types import Message, Turn

END = 0


class ScriptedSnapshot:
    """Fixed logits over the replies."""

    def __init__(self, replies: Sequence[str], logits: np.ndarray, version: int) -> None:
        """`logits` float64 [R], one for each reply."""
        self._replies, self._version = replies, version
        self._logits = logits.copy()

    @property
    def version(self) -> int:
        """Updates seen."""
        return self._version

    async def sample(
        self, prompt: Sequence[Message] | Sequence[int], *, count: int, seed: int, sampling: SamplingConfig
    ) -> tuple[Turn, ...]:
        """Replies drawn from softmax(logits / temperature); the reply's logprob lies on its first token."""
        logprobs = _log_softmax(self._logits / (sampling.temperature or 1.0))
        if sampling.temperature:
            drawn = np.random.default_rng(seed).choice(len(logprobs), size=count, p=np.exp(logprobs))
        else:
            drawn = np.full(count, int(np.argmax(self._logits)))
        return tuple(self._turn(_tokens(prompt), int(reply), logprobs, sampling) for reply in drawn)

    def _turn(self, prompt: tuple[int, ...], reply: int, logprobs: np.ndarray, sampling: SamplingConfig) -> Turn:
        tokens = (*map(ord, self._replies[reply]), END)[: sampling.max_tokens]
        return Turn(
            prompt=prompt,
            tokens=tokens,
            logprobs=(float(logprobs[reply]), *[0.0] * (len(tokens) - 1)),
            text="".join(map(chr, tokens)).rstrip(chr(END)),
            stop="stop" if tokens[-1] == END else "length",
            version=self._version,
        )


class ScriptedPolicy:
    """Logits in training."""

    def __init__(self, replies: Sequence[str], folder: Path, *, state: str = "", version: int = 0) -> None:
        """`folder` takes checkpoints; `state` is the path of one to go on from."""
        self._replies, self._folder, self._version = tuple(replies), folder, version
        self._logits = np.array(json.loads(Path(state).read_text())) if state else np.zeros(len(replies))

    @property
    def version(self) -> int:
        """Updates made."""
        return self._version

    async def snapshot(self) -> ScriptedSnapshot:
        """A copy of the logits."""
        return ScriptedSnapshot(self._replies, self._logits, self._version)

    async def update(
        self, samples: Sequence[Sample], loss: Loss, optimizer: OptimizerConfig, learning_rate: float
    ) -> Updated:
        """One step of plain gradient ascent; moments and clipping are left out."""
        if loss.name != "importance_sampling":
            raise Unsupported(f"The scripted policy has no loss {loss.name}.", "Use importance_sampling.")
        before = _log_softmax(self._logits)
        gradient, total, answers = np.zeros_like(self._logits), 0.0, []
        for sample in samples:
            first = int(np.argmax(sample.mask))
            reply = self._reply(sample.targets[sample.mask])
            weight = np.exp(before[reply] - sample.logprobs[first]) * float(sample.advantages[first])
            gradient += weight * (np.eye(len(before))[reply] - np.exp(before))
            total -= weight
            logprobs = np.zeros(len(sample.targets), np.float32)
            logprobs[first] = before[reply]
            answers.append(logprobs)
        self._logits = self._logits + learning_rate * gradient
        self._version += 1
        norm = float(np.linalg.norm(gradient))
        return Updated(logprobs=tuple(answers), metrics={"loss:sum": total, "grad_norm": norm})

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """The logits as JSON; time to live is left out."""
        path = self._folder / f"{name}-{self._version}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._logits.tolist()))
        return str(path)

    async def save_for_sampling(self, name: str) -> str:
        """As `save`."""
        return await self.save(f"{name}-sampling", None)

    async def close(self) -> None:
        """Nothing to end."""

    def _reply(self, tokens: np.ndarray) -> int:
        text = "".join(chr(token) for token in tokens if token != END)
        return next(index for index, reply in enumerate(self._replies) if reply.startswith(text))


def _tokens(prompt: Sequence[Message] | Sequence[int]) -> tuple[int, ...]:
    parts = [tuple(map(ord, part.content)) if isinstance(part, Message) else (part,) for part in prompt]
    return tuple(token for part in parts for token in part)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
