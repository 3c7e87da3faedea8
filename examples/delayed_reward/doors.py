"""A game of three doors that pays at the end: the coins of the player, plus or minus half a coin for each door.

The right way is through the open door. The coins of the players differ far more than the doors are worth, so without a
baseline that knows the player, the replies of a rich player are reinforced whatever they are.
"""

from __future__ import annotations

from tinsmith import Conversation, Task, workflow

OWNS = {"beggar": 0.0, "farmer": 3.0, "merchant": 6.0, "king": 9.0}


@workflow("doors")
async def doors(
    task: Task, conversation: Conversation, ask: str = "\n{player}, {door} door open: go"
) -> dict[str, float]:
    """Three replies of one word; the reward comes after the last."""
    player, *open_doors = task.answer.split()
    won = 0.0
    messages = list(task.messages)
    for door in open_doors:
        reply = await conversation.say(*messages, ask.format(player=player, door=door))
        won += 0.5 if reply.text.strip() == door else -0.5
        messages = []
    return {"owns": OWNS[player], "doors": won}
