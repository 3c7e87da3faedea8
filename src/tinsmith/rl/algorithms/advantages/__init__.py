"""The table of advantages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.algorithms.advantages.group import Best, ClipB, Grpo, Opmd, Rec, Reinforce, Rloo
from tinsmith.rl.algorithms.advantages.multi_turn import Gigpo, StepWiseGrpo
from tinsmith.rl.algorithms.advantages.per_token import Gae, Jsd, OnPolicyDistill, ReinforcePlusPlus

AdvantageConfig = Annotated[
    Grpo | Opmd | Reinforce | Rloo | Rec | StepWiseGrpo | Gigpo | ReinforcePlusPlus | Gae | OnPolicyDistill
    | Jsd | ClipB | Best,
    Field(discriminator="type"),
]  # fmt: skip
