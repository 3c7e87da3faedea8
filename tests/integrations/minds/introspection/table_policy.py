"""A policy over characters with known next-token distributions, for brute-force tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import (
    ModelVersion,
    PromptLogprobs,
    SampleRequest,
    SampleResult,
    SamplingConfig,
    Snapshot,
)
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Turn
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.testing import END, CharacterCodec

VOCABULARY = 128


class TablePolicy(Snapshot):
    """Replies with fixed texts; the distribution after each prefix is drawn from a hash of the prefix."""

    def __init__(self, *replies: str, fails: bool = False) -> None:
        async def open_model(name: str) -> Snapshot:
            raise NotImplementedError(name)

        super().__init__(ModelVersion(version=3, chat=CharacterCodec(), sample=self._answer, open_model=open_model))
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

    async def _answer(self, request: SampleRequest) -> SampleResult:
        if request.logprobs is None:
            return SampleResult(turns=self._turns(request))
        self.requests += 1
        if self.fails:
            raise ConnectionError("the server is away")
        tokens = [int(token) for token in request.prompt]
        if isinstance(request.logprobs, PromptLogprobs):
            begin = 1 if request.logprobs.last is None else len(tokens) - request.logprobs.last
            logprobs = [self.distribution(tokens[:at])[tokens[at]] for at in range(begin, len(tokens))]
            return SampleResult(logprobs=np.array(logprobs, np.float32))
        distribution = self.distribution(tokens)
        ids = np.array(request.logprobs.ids or np.argsort(-distribution)[: request.logprobs.top], np.int64)
        return SampleResult(ids=ids, logprobs=distribution[ids].astype(np.float32))

    def _turns(self, request: SampleRequest) -> tuple[Turn, ...]:
        assert request.count == len(self.replies)
        tokens = tuple(self.chat.prompt(request.prompt))
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


def context() -> WorkflowContext:
    """What a run gives to an environment."""
    return WorkflowContext(sampling=SamplingConfig(max_tokens=32), rewards=Rewards([]), agent_endpoint=AgentEndpoint())
