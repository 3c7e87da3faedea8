"""A game of three doors that pays when it is over: what the player owns, and half a coin more or less for each door.

The right way is through the open door. What a player owns differs from task to task by far more than the
doors are worth: without a baseline that knows the player, a king's reward praises whatever was said.
"""

from __future__ import annotations

from tinsmith.rl.plugins import workflow
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.custom import Talk

OWNS = {"beggar": 0.0, "farmer": 3.0, "merchant": 6.0, "king": 9.0}


@workflow("doors")
async def doors(task: Task, talk: Talk, ask: str = "\n{player}, {door} door open: go") -> dict[str, float]:
    """Three replies of one word; the reward comes after the last."""
    player, *open_doors = task.answer.split()
    won = 0.0
    said = list(task.messages)
    for door in open_doors:
        reply = await talk.say(*said, ask.format(player=player, door=door))
        won += 0.5 if reply.text.strip() == door else -0.5
        said = []
    return {"owns": OWNS[player], "doors": won}
