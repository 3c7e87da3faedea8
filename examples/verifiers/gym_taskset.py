"""A verifiers taskset (API verifiers.v1) of the procedural tasks of reasoning-gym, scored by their own scorers."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from reasoning_gym import create_dataset, get_score_answer_fn

__all__ = ["GymTaskset"]


class GymData(vf.TaskData):
    """A question, and the entry of reasoning-gym that its scorer reads."""

    entry: dict[str, Any]


class GymTask(vf.Task[GymData]):
    """Rewards of a reply: the text after the last `Answer:`, or all of it."""

    def _answer(self, trace: vf.Trace) -> str:
        return trace.last_reply.rpartition("Answer:")[2].strip()

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        entry = self.data.entry
        return get_score_answer_fn(entry["metadata"]["source_dataset"])(self._answer(trace), entry)

    @vf.metric
    async def marked(self, trace: vf.Trace) -> float:
        return float("Answer:" in trace.last_reply)


class GymConfig(vf.TasksetConfig):
    """Options of the taskset."""

    dataset: str = "basic_arithmetic"
    """Name of a dataset of reasoning-gym."""
    seed: int = 0
    """Seed of the tasks; another seed gives tasks for an evaluation."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset."""
    prompt: str = "{question}\nEnd with `Answer:` and the answer only."
    """Template of the prompt."""


class GymTaskset(vf.Taskset[GymTask, GymConfig]):
    """Endless tasks; a run takes as many as its `size`."""

    INFINITE = True

    def load(self) -> Iterator[GymTask]:
        config = self.config
        entries = create_dataset(config.dataset, seed=config.seed, size=10**9, **config.options)
        for index in range(len(entries)):
            entry = dict(entries[index])
            prompt = config.prompt.replace("{question}", entry["question"])
            yield GymTask(GymData(prompt=prompt, entry=entry), config.task)
