"""A game of three doors with one reward at the end: the coins of the player, plus or minus 0.5 for each door.

The right reply is the open door. The coins of the players differ far more than the rewards of the doors, so without a
baseline that depends on the player, all replies of a rich player are reinforced.
"""

from __future__ import annotations

from tinsmith import Conversation, Task, workflow

OWNS = {"beggar": 0.0, "farmer": 3.0, "merchant": 6.0, "king": 9.0}


@workflow("doors")
async def doors(
    task: Task, conversation: Conversation, ask: str = "\n{player}, {door} door open: go"
) -> dict[str, float]:
    """Play a game of three one-word replies, and return its reward."""
    player, *open_doors = task.answer.split()
    score = 0.0
    messages = list(task.messages)
    for door in open_doors:
        reply = await conversation.say(*messages, ask.format(player=player, door=door))
        score += 0.5 if reply.text.strip() == door else -0.5
        messages = []
    return {"owns": OWNS[player], "doors": score}
