"""Advantages, and AdvantageConfig: the union of their settings, by `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.algorithms.advantages.batch import PrpoAdvantage, ReinforcePlusPlusBaselineAdvantage
from tinsmith.rl.algorithms.advantages.group import (
    BestAdvantage,
    ClipBAdvantage,
    GrpoAdvantage,
    OpmdAdvantage,
    RecAdvantage,
    ReinforceAdvantage,
    RlooAdvantage,
)
from tinsmith.rl.algorithms.advantages.multi_turn import GigpoAdvantage, StepWiseGrpoAdvantage
from tinsmith.rl.algorithms.advantages.per_token import (
    GaeAdvantage,
    JsdAdvantage,
    NoAdvantage,
    OnPolicyDistillAdvantage,
    PrimeAdvantage,
    ReinforcePlusPlusAdvantage,
)
from tinsmith.rl.algorithms.advantages.user_code import CustomAdvantage, PrecomputedAdvantage

AdvantageConfig = Annotated[
    GrpoAdvantage
    | OpmdAdvantage
    | ReinforceAdvantage
    | RlooAdvantage
    | RecAdvantage
    | StepWiseGrpoAdvantage
    | GigpoAdvantage
    | ReinforcePlusPlusAdvantage
    | GaeAdvantage
    | OnPolicyDistillAdvantage
    | JsdAdvantage
    | PrimeAdvantage
    | NoAdvantage
    | ClipBAdvantage
    | BestAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | PrpoAdvantage
    | PrecomputedAdvantage
    | CustomAdvantage,
    Field(discriminator="type"),
]
