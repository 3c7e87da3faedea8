"""A policy over characters with known next-token distributions, for brute-force tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.base import SamplingConfig, Snapshot
from tinsmith.rl.policy.scripted import END, CharacterCodec
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Turn
from tinsmith.rl.workflows.base import WorkflowContext

VOCABULARY = 128


class TablePolicy(Snapshot):
    """Replies with fixed texts; the distribution after each prefix is drawn from a hash of the prefix."""

    version = 3
    chat = CharacterCodec()

    def __init__(self, *replies: str, fails: bool = False) -> None:
        self.replies, self.fails = replies, fails
        self.requests = 0

    def distribution(self, tokens: Sequence[int]) -> np.ndarray:
        """Logprobs of all tokens after `tokens`, float64 [VOCABULARY]."""
        digest = hashlib.sha256(bytes(token % 256 for token in tokens)).digest()
        logits = 4 * np.random.default_rng(int.from_bytes(digest[:8])).standard_normal(VOCABULARY)
        return logits - np.log(np.exp(logits).sum())

    def text_logprobs(self, context: str, text: str) -> np.ndarray:
        """Logprobs of the characters of `text` after `context`."""
        return np.array(
            [self.distribution([ord(c) for c in context + text[:at]])[ord(text[at])] for at in range(len(text))]
        )

    async def sample(self, prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        assert count == len(self.replies)
        tokens = tuple(self.chat.prompt(prompt))
        return tuple(
            Turn(
                prompt=tokens,
                tokens=(*map(ord, text), END),
                logprobs=(-1.0,) * (len(text) + 1),
                text=text,
                stop="stop",
                version=self.version,
            )
            for text in self.replies
        )

    async def logprobs(self, tokens, last=None):
        self._request()
        begin = 1 if last is None else len(tokens) - last
        return np.array([self.distribution(tokens[:at])[tokens[at]] for at in range(begin, len(tokens))], np.float32)

    async def next_logprobs(self, tokens, ids):
        self._request()
        return self.distribution(tokens)[list(ids)].astype(np.float32)

    async def top_logprobs(self, tokens, count):
        self._request()
        logprobs = self.distribution(tokens)
        ids = np.argsort(-logprobs)[:count]
        return ids.astype(np.int64), logprobs[ids].astype(np.float32)

    def _request(self) -> None:
        self.requests += 1
        if self.fails:
            raise ConnectionError("the server is away")


def context() -> WorkflowContext:
    """What a run gives to an environment."""
    return WorkflowContext(sampling=SamplingConfig(max_tokens=32), rewards=Rewards([]), agent_endpoint=AgentEndpoint())
