"""The table of advantages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.algorithms.advantages.distill import Jsd, OnPolicyDistill
from tinsmith.rl.algorithms.advantages.group import Best, Grpo, Opmd, Rec, Reinforce, Rloo
from tinsmith.rl.algorithms.advantages.sharpness import ClipB
from tinsmith.rl.algorithms.advantages.tokens import Gae, ReinforcePlusPlus
from tinsmith.rl.algorithms.advantages.turns import Gigpo, StepWiseGrpo

AdvantageConfig = Annotated[
    Grpo | Opmd | Reinforce | Rloo | Rec | StepWiseGrpo | Gigpo | ReinforcePlusPlus | Gae | OnPolicyDistill
    | Jsd | ClipB | Best,
    Field(discriminator="type"),
]  # fmt: skip
