"""Data types of a run: Task, Message, Turn, Trajectory, Rollout, Group and Demonstration. All are frozen dataclasses.

A workflow runs a Task and returns Rollouts. A Rollout has a Trajectory for each role that took part, with a reward; a
Trajectory is a list of Turns, and a Turn is one sampled reply. A Group holds the Rollouts of one Task by one version of
the policy, so that an algorithm can compare the trajectories of a role. Most workflows have one role, `policy`.

Dimensions: G rollouts of a group, N prompt tokens of a turn, L sampled tokens of a turn.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tinsmith.chat.strict_json import check_text

POLICY = "policy"
"""The role of workflows with a single role."""

Termination = Literal["done", "max_prompt", "max_response", "max_turns", "timeout", "error"]
"""Why a rollout ended: the workflow was `done`, or it reached a limit, or it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image file, PNG or JPEG.

    Example: Image.of(Path("chart.png").read_bytes())
    """

    format: Literal["png", "jpeg"]
    """Format of the file."""
    data: str = field(repr=False)
    """The file in base64."""

    @classmethod
    def of(cls, file: bytes) -> Image:
        """The image of a file. Raises ValueError for other formats."""
        for name, start in (("png", b"\x89PNG\r\n\x1a\n"), ("jpeg", b"\xff\xd8\xff")):
            if file.startswith(start):
                return cls(format=name, data=base64.b64encode(file).decode("ascii"))  # type: ignore[arg-type]
        raise ValueError("it is neither a PNG nor a JPEG file")

    @property
    def file(self) -> bytes:
        """The file."""
        return base64.b64decode(self.data)

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the data; equal for equal files."""
        return hashlib.sha256(self.data.encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image among the tokens of a prompt, whose placeholders are at positions `start` to `start + length`."""

    image: Image
    """The image."""
    start: int
    """Position of its first token."""
    length: int
    """Number of tokens that the model sees of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Token ids and the images among them."""

    tokens: tuple[int, ...]
    """[N] token ids, with the model's placeholder at the positions of images."""
    images: tuple[PlacedImage, ...] = ()
    """Images in order of their positions."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


Tokens = Sequence[int] | EncodedPrompt
"""Token ids, with or without images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A chat message.

    Example: Message(role="user", content="What is 39 + 13? Answer with the number only.")
    """

    role: str
    """Role for the chat template: system, user, assistant or tool."""
    content: str
    """Text of the message."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields for the chat template, such as tool_calls and name."""
    images: tuple[tuple[int, Image], ...] = ()
    """Images in order, each with its position in `content`: the number of characters before it."""

    def __post_init__(self) -> None:
        """Raise ValueError for half a surrogate pair, which neither a tokenizer nor a file of the run takes."""
        try:
            check_text(str(self.content))
        except ValueError as error:
            raise ValueError(f"the content of a message is no text: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt and the data that rewards need to score a reply.

    Example: Task(id="addition/2042", messages=(Message(role="user", content="What is 39 + 13?"),), answer="52")
    """

    id: str
    """Name of the source and index within it, such as gsm8k/17; stable across runs of the same run file."""
    messages: tuple[Message, ...]
    """The prompt. If the last message is the assistant's, the policy continues it."""
    answer: str = ""
    """Reference answer; empty if there is none, or if `extra` holds it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON-serializable data for workflows and rewards, such as a reasoning-gym entry."""
    environment: str = ""
    """Name of the environment that the task belongs to; empty in a run without environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A reply from a dataset to train on, or a pair of a better and a worse reply, or a reply with a label.

    Example: Demonstration(id="addition/2042", messages=(question, Message(role="assistant", content="52")))
    """

    id: str
    """Name of the source and index within it."""
    messages: tuple[Message, ...]
    """A chat that ends with the reply to learn; of a pair, with the better reply."""
    rejected: tuple[Message, ...] = ()
    """Of a pair: the chat that ends with the worse reply. Empty if there is no pair."""
    desirable: bool | None = None
    """Of a reply with a label: whether it is good. None if it has no label."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool definitions for the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sampled reply and its prompt.

    Example: Turn(prompt=(1, 4093, 198), tokens=(37, 34, 2), logprobs=(-0.9, -0.4, -0.1), text="52", stop="stop")
    """

    prompt: tuple[int, ...]
    """[N] token ids before the reply, including earlier turns of the conversation."""
    tokens: tuple[int, ...]
    """[L] sampled token ids, including the stop token."""
    logprobs: tuple[float, ...]
    """[L] log-probabilities (nats) of `tokens` under the sampling distribution, at its temperature; or at temperature 1
    if the algorithm needs those (algorithm.old_logprobs)."""
    text: str
    """Decoded reply without the stop token or stop string; rewards read this."""
    stop: Literal["stop", "length"]
    """Why sampling ended: `stop` at a stop token or string, `length` at max_tokens."""
    model: str = ""
    """Model that sampled the reply, if it is not the policy; such a turn is not trained on."""
    version: int = 0
    """Number of updates of the weights that sampled the reply."""
    reward: float | None = None
    """Reward of this turn alone, if the workflow sets one; the trajectory's reward covers all turns."""
    state: str = ""
    """Key of the environment state before the reply, equal for equal states; for algorithms that compare turns."""
    advantages: float | tuple[float, ...] | None = None
    """Advantage of all tokens, or [L] of each, if the workflow computes it; for the advantage `precomputed`. In what
    monitors receive: the advantage that the turn was trained with."""
    trainer_logprobs: tuple[float, ...] = ()
    """[L] log-probabilities of `tokens` by the weights in training, before the update that trained on them; empty until
    then."""
    routed_experts: str = ""
    """Record of the experts of `prompt` and `tokens[:-1]` in a mixture (`routed_experts.to_text`), where
    model.router_replay is on."""
    images: tuple[PlacedImage, ...] = ()
    """Images among `prompt`, in order of their positions."""

    @property
    def sequence(self) -> Tokens:
        """Prompt and reply."""
        tokens = (*self.prompt, *self.tokens)
        return EncodedPrompt(tokens=tokens, images=self.images) if self.images else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The turns of one role in a rollout. A role that acts several times independently has several trajectories.

    Example: Trajectory(role="solver", turns=(turn,), reward=1.0)
    """

    turns: tuple[Turn, ...] = ()
    """Sampled replies in order."""
    role: str = POLICY
    """Role of the policy; algorithms compare the trajectories of one role."""
    reward: float = 0.0
    """Weighted sum of the reward functions plus the workflow's own reward."""
    trained: bool = True
    """Whether to train on the turns."""

    @property
    def text(self) -> str:
        """Text of the last turn; empty if there are no turns."""
        return self.turns[-1].text if self.turns else ""

    @property
    def truncated(self) -> bool:
        """Whether the last turn ended at max_tokens."""
        return bool(self.turns) and self.turns[-1].stop == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An attempt at a task. A failed rollout has an `error` and is not trained on.

    Example: Rollout(trajectories=(solver, judge), correct=True, metrics={"solver_accuracy": 0.5})
    """

    trajectories: tuple[Trajectory, ...] = ()
    """Trajectories of all roles, in the order in which they began."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each reward function by name, before its weight."""
    correct: bool | None = None
    """Whether the attempt is right, as pass@k counts it; None if neither the workflow nor a reward says so."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the workflow, averaged over rollouts."""
    termination: Termination = "done"
    """Why the rollout ended."""
    error: str = ""
    """Reason of the failure; empty if the rollout succeeded."""

    @classmethod
    def single(
        cls,
        turns: tuple[Turn, ...] = (),
        reward: float = 0.0,
        *,
        reward_parts: Mapping[str, float] | None = None,
        correct: bool | None = None,
        error: str = "",
    ) -> Rollout:
        """A rollout with one trajectory, of the role `policy`."""
        return cls(
            trajectories=(Trajectory(turns=turns, reward=reward),),
            reward_parts=reward_parts or {},
            correct=correct,
            error=error,
        )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of all trajectories."""
        return tuple(turn for trajectory in self.trajectories for turn in trajectory.turns)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(turn.tokens) for turn in self.turns if not turn.model)

    @property
    def text(self) -> str:
        """Text of the last turn; empty if there are no turns."""
        return next((trajectory.text for trajectory in reversed(self.trajectories) if trajectory.turns), "")

    @property
    def reward(self) -> float:
        """Mean reward of the trajectories; 0 if there are none."""
        return sum(each.reward for each in self.trajectories) / max(1, len(self.trajectories))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the trajectories, each once, in order."""
        return tuple(dict.fromkeys(trajectory.role for trajectory in self.trajectories))

    def failed(self, error: str) -> Rollout:
        """The rollout with its turns, without rewards, and with this error."""
        trajectories = tuple(replace(trajectory, reward=0.0) for trajectory in self.trajectories)
        return Rollout(trajectories=trajectories, termination="error", error=error)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Group:
    """Rollouts of one task by one version of the policy; algorithms compare them with each other.

    Example: Group(task=task, rollouts=(correct, wrong, failed), version=12)
    """

    task: Task
    """The task of all rollouts."""
    rollouts: tuple[Rollout, ...]
    """[G] rollouts, including failed ones."""
    version: int = 0
    """Number of updates of the weights that sampled the group."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the rollouts that did not fail."""
        return tuple(rollout.reward for rollout in self.rollouts if not rollout.error)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the rollouts that did not fail, each once, in order."""
        return tuple(dict.fromkeys(role for rollout in self.rollouts if not rollout.error for role in rollout.roles))

    def trajectories(self, role: str) -> tuple[Trajectory, ...]:
        """The trajectories of a role in the rollouts that did not fail."""
        return tuple(
            trajectory
            for rollout in self.rollouts
            if not rollout.error
            for trajectory in rollout.trajectories
            if trajectory.role == role
        )

    def constant_role(self, role: str) -> bool:
        """Whether a comparison of a role's trajectories has no signal: fewer than two, or all rewards are equal."""
        return len({trajectory.reward for trajectory in self.trajectories(role)}) < 2

    @property
    def constant(self) -> bool:
        """Whether no role has a signal."""
        return all(map(self.constant_role, self.roles))
