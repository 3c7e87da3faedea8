"""Records of shadow steps, and the protocol of a server that takes them.

A shadow step is one optimizer step on a copy of the policy's weights. Its result is by how much the step changes the
logprobs of probe texts. The policy, its optimizer and its pending gradient stay as they are.

Dimensions: N targets of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tinsmith.errors import Unsupported
from tinsmith.integrations.minds.shadow.config import Mode, Optimizer, Rung, StepParams
from tinsmith.plurals import counted
from tinsmith.rl.policy.chat import ChatCodec
from tinsmith.rl.types import Message, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowText:
    """A text to train on, or a probe whose logprob is measured.

    Example: ShadowText(tokens=(5, 6, 7), weights=(0.0, 1.0)) is the logprob of 7 after 5 and 6.
    """

    tokens: tuple[int, ...]
    """[N + 1] token ids."""
    weights: tuple[float, ...]
    """[N] weights of the targets, which are tokens 1 to N. The loss of a train text is -sum(weights * logprobs); the
    value of a probe is sum(weights * logprobs)."""

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.weights) != len(self.tokens) - 1:
            size = f"{counted(len(self.tokens), 'token')} with {counted(len(self.weights), 'weight')}"
            raise ValueError(f"a text of {size}; N + 1 have N")
        if not any(self.weights):
            raise ValueError("every weight of the text is 0")

    @classmethod
    def chat(cls, codec: ChatCodec, messages: Sequence[Message], weight: float = 1.0) -> ShadowText:
        """A chat in the chat template; the tokens of its last message, the assistant's, have `weight`, the others 0."""
        tokens, mask = codec.encode_with_loss_mask(messages)
        return cls(tokens=tuple(tokens), weights=tuple(weight if trained else 0.0 for trained in mask[1:]))

    @classmethod
    def reply(cls, turn: Turn, weight: float = 1.0) -> ShadowText:
        """A sampled reply with its prompt; the tokens of the reply have `weight`, such as its advantage."""
        if turn.images:
            raise Unsupported("Shadow updates take no images.", "Use texts without images.")
        weights = (0.0,) * (len(turn.prompt) - 1) + (weight,) * len(turn.tokens)
        return cls(tokens=(*turn.prompt, *turn.tokens), weights=weights)

    def scaled(self, factor: float) -> ShadowText:
        """The text with its weights multiplied by `factor`, which is not 0."""
        return replace(self, weights=tuple(weight * factor for weight in self.weights))

    def value(self, logprobs: np.ndarray) -> float:
        """sum(weights * logprobs), in float64; logprobs [N]."""
        return float(np.dot(np.asarray(self.weights, np.float64), np.asarray(logprobs, np.float64)))

    @property
    def weight(self) -> float:
        """Sum of the absolute weights."""
        return float(np.abs(self.weights).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDelta:
    """Effect of a shadow step on one probe.

    Example: ProbeDelta(logprob_pre=-4.5, logprob_post=-4.25, delta=0.25, mean=0.125)
    """

    delta: float
    """By how much the step changes sum(weights * logprobs) of the probe, in nats."""
    mean: float
    """`delta` for each unit of weight: the change for a token, if all weights are 1."""
    logprob_pre: float | None = None
    """sum(weights * logprobs) before the step; None if the rung does not measure it."""
    logprob_post: float | None = None
    """The same after the step; None if the rung does not measure it."""

    @classmethod
    def of(cls, probe: ShadowText, delta: float, pre: float | None = None, post: float | None = None) -> ProbeDelta:
        """The effect `delta` on `probe`."""
        return cls(delta=delta, mean=delta / probe.weight, logprob_pre=pre, logprob_post=post)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowDelta:
    """Result of a shadow step.

    Example: ShadowDelta(probes=(effect,), version=12, rung="fork", optimizer="sgd", mode="exact")
    """

    probes: tuple[ProbeDelta, ...]
    """The effect on each probe, in their order."""
    version: int
    """Version of the policy that the step starts from."""
    rung: Rung
    """How the step was taken."""
    optimizer: Optimizer
    """Optimizer of the step."""
    mode: Mode
    """Whether the logprobs were measured after the step, or the change is its first-order approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowGroup:
    """Train texts of one step, and the probes that it is measured on.

    Example: ShadowGroup(train=(reply,), probes=(capital, colour))
    """

    train: tuple[ShadowText, ...]
    probes: tuple[ShadowText, ...]


class Fork(Protocol):
    """A copy of the policy's weights at one version, in training by itself."""

    async def step(
        self, group: ShadowGroup, params: StepParams, *, before: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Take a step on the train texts. Returns the logprobs of the probes before (empty without `before`) and after.

        Every error of a request is seen; the first one is raised.
        """
        ...

    async def logprobs(self, texts: Sequence[ShadowText]) -> list[np.ndarray]:
        """Logprobs of the targets of each text, [N]."""
        ...

    def release(self) -> None:
        """Free the fork. Does not wait, so that a cancelled rollout may call it."""
        ...


class ShadowServer(Protocol):
    """Access of a ShadowService to the policy on a server."""

    @property
    def version(self) -> int:
        """Version of the weights that the next request to the policy reads."""
        ...

    @property
    def oldest(self) -> int:
        """Oldest version that steps may start from."""
        ...

    @property
    def steps_virtually(self) -> bool:
        """Whether the server has the loss `shadow`, which takes shadow steps in one forward call."""
        ...

    @property
    def live_forks(self) -> int:
        """Number of forks that are not released."""
        ...

    async def fork(self, version: int, *, inherit: bool) -> Fork:
        """Copy the weights of a version, with the optimizer's moments if `inherit`.

        Raises UserError for a version that is no longer there.
        """
        ...

    async def virtual(
        self, groups: Sequence[ShadowGroup], version: int, params: StepParams, mode: Mode
    ) -> list[tuple[ProbeDelta, ...]]:
        """Take the steps of all groups in one call, each from the weights of `version`."""
        ...

    async def close(self) -> None:
        """End the sessions of all forks."""
        ...
