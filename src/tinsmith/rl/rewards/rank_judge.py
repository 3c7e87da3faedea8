"""LLM as judge of a group: another model ranks the replies to a task, best first, with ties.

The replies are in random order, so that a preference of the judge for a position averages out. After a response
without a ranking, the request is repeated; if there is still none, all rollouts of the group have failed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, field_validator
from typing_extensions import override

from tinsmith.plurals import counted
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards.judge import ModelJudge, question_of
from tinsmith.rl.types import Rollout, Task

RANK = """You compare {count} answers to a question.

Question:
{question}

Right answer, if one is known:
{answer}

{replies}

Which answers are better? Compare them in a few sentences.
Then write a last line that starts with "Ranking:" and has the numbers of all {count} answers, best first, with > after
an answer that is better than the next and = after one that is equally good."""

_HEAD = re.compile(r"ranking[\s*_`]*:", re.IGNORECASE)
_MARKUP = re.compile(r"[*_`#\[\]()]|\b(?:answer|reply)\b", re.IGNORECASE)


class RankJudge(ModelJudge):
    """Share of the other replies of the group that a model ranks below a reply, equal ones as half: from 0 for the
    worst to 1 for the best. The mean of a group is always 1/2, so that evaluations do not use this reward."""

    type: Literal["rank_judge"] = "rank_judge"
    prompt: str = ""
    """Replaces the built-in prompt. Fields: {question}, {answer}, {replies}, {count}. The response must end as the
    built-in prompt says: `Ranking: 2 > 1 = 3`."""
    passes: int = Field(default=1, ge=1)
    """Rankings of each group, each with the replies in another random order. Scores are their means."""
    retries: int = Field(default=2, ge=0)
    """Times to ask again, in another order, after a response without a ranking, before the group fails."""
    replies_per_prompt: int = Field(default=8, ge=3)
    """Largest number of replies in a prompt. Each pass divides a larger group at random into parts that are ranked
    apart: set `passes` higher then."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if prompt and "{replies}" not in prompt:
            raise ValueError("it has no {replies}, where the replies to rank come")
        return prompt

    @override
    async def judge_group(
        self, task: Task, rollouts: Sequence[Rollout], policy: Snapshot, seed: int
    ) -> Sequence[float]:
        """The scores of at least two replies. Raises ValueError if there are fewer, or if there is no ranking."""
        if len(rollouts) < 2:
            raise ValueError(f"{self.title} ranks two replies or more, and the group has {len(rollouts)}")
        texts = [rollout.text for rollout in rollouts]
        generators = np.random.default_rng(seed).spawn(self.passes)
        passes = (self._pass(task, texts, policy, random) for random in generators)
        return np.mean(await asyncio.gather(*passes), axis=0).tolist()

    async def _pass(
        self, task: Task, texts: Sequence[str], policy: Snapshot, random: np.random.Generator
    ) -> np.ndarray:
        """The scores of all replies, float64 [G], by a ranking of each part."""
        order = random.permutation(len(texts))
        parts = [part.tolist() for part in np.array_split(order, -(-len(texts) // self.replies_per_prompt))]
        scored = await asyncio.gather(
            *(
                self._scores(task, [texts[int(at)] for at in part], policy, own_random)
                for part, own_random in zip(parts, random.spawn(len(parts)), strict=True)
            )
        )
        scores = np.empty(len(texts))
        scores[order] = np.concatenate(scored)
        return scores

    async def _scores(
        self, task: Task, texts: Sequence[str], policy: Snapshot, random: np.random.Generator
    ) -> np.ndarray:
        """The scores of the replies in a prompt, float64. The judge reads equal replies once; all equal: not at all."""
        distinct = list(dict.fromkeys(texts))
        ranks = await self._ranks(task, distinct, policy, random) if len(distinct) > 1 else [0]
        rank_of = dict(zip(distinct, ranks, strict=True))
        ranks_G = np.array([rank_of[text] for text in texts])
        below, equal = (ranks_G > ranks_G[:, None]).sum(1), (ranks_G == ranks_G[:, None]).sum(1) - 1
        return (below + equal / 2) / (len(texts) - 1)

    async def _ranks(
        self, task: Task, texts: Sequence[str], policy: Snapshot, random: np.random.Generator
    ) -> list[int]:
        """The rank of each reply, 0 the best. Raises ValueError if no response has them."""
        response = ""
        for attempt in range(self.retries + 1):
            order = random.permutation(len(texts)).tolist()
            replies = "\n\n".join(f"Answer {number}:\n{texts[at]}" for number, at in enumerate(order, 1))
            fields = {
                "question": question_of(task),
                "answer": task.answer,
                "replies": replies,
                "count": str(len(texts)),
            }
            response = await self.ask(self.prompt or RANK, fields, policy, seed=attempt)
            if (ranks := read_ranking(response, len(texts))) is not None:
                return [ranks[order.index(at)] for at in range(len(texts))]
        raise ValueError(f"the judge gave no ranking of {counted(len(texts), 'reply')}: {response[-200:]!r}")


def read_ranking(response: str, count: int) -> list[int] | None:
    """The ranks of the answers 1 to `count`, 0 the best and equal for ties; None unless the last `Ranking:` has each of
    them once.

    Example: read_ranking("The second is best. Ranking: 2 > 1 = 3", 3) == [1, 0, 1]
    """
    _, *after = _HEAD.split(response)
    line = next((line for line in after[-1].splitlines() if line.strip("*_` ")), "") if after else ""
    levels = re.split("[>,]", _MARKUP.sub(" ", line).rstrip(" ."))
    ties = [[number.strip() for number in level.split("=")] for level in levels]
    rank_of = {number: rank for rank, level in enumerate(ties) for number in level}
    numbers = [str(number) for number in range(1, count + 1)]
    if sum(map(len, ties)) != count or rank_of.keys() != set(numbers):
        return None
    return [rank_of[number] for number in numbers]
