"""One rollout's conversation with the policy: every reply is kept as it was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinsmith.rl.policy import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.types import Message, Turn


class Talk:
    """Say things and get replies. What is said goes on from what was said before, until `afresh`.

    Example: reply = await talk.say("What is 39 + 13?"); if reply.text != "52": await talk.say("Are you sure?")
    """

    def __init__(self, policy: Snapshot, sampling: SamplingConfig, seed: int) -> None:
        """`seed` is the rollout's own; each reply draws from it by its place."""
        self.policy = policy
        self._sampling, self._seed = sampling, seed
        self._said: list[Message | Turn] = []
        self._turns: list[Turn] = []
        self._asked = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every reply so far."""
        return tuple(self._turns)

    async def say(
        self,
        *messages: Message | str,
        state: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Turn:
        """The policy's reply to what was said before and these messages; a text is one of the user.

        `state` names what the policy is looking at, for algorithms that compare turns; `tools` go to the chat template;
        `sampling` changes settings of this reply. Raises PromptTooLong.
        """
        said = [*self._said, *(Message(role="user", content=one) if isinstance(one, str) else one for one in messages)]
        settings = SamplingConfig.model_validate({**self._sampling.model_dump(), **(sampling or {})})
        prompt = self.policy.chat.prompt(said, tools)
        seed = request_seed(self._seed, self._asked)
        (turn,) = await self.policy.sample(prompt, count=1, seed=seed, sampling=settings)
        turn = replace(turn, state=state)
        self._asked += 1
        self._said = [*said, turn]
        self._turns.append(turn)
        return turn

    def credit(self, reward: float) -> None:
        """What the last reply alone was worth."""
        self._turns[-1] = replace(self._turns[-1], reward=reward)

    def afresh(self) -> None:
        """Forget what was said: the next reply begins a conversation, and a row to train on, of its own."""
        self._said = []
