"""Policy losses, and LossConfig: the union of their settings, by `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.algorithms.losses.distillation import TopKDistillLoss
from tinsmith.rl.algorithms.losses.policy_gradient import (
    CispoLoss,
    DroLoss,
    GspoLoss,
    ImportanceSamplingLoss,
    PpoLoss,
    RecLoss,
    SapoLoss,
    SppoLoss,
    ToprLoss,
)
from tinsmith.rl.algorithms.losses.preference import BradleyTerryLoss, DpoLoss, IpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from tinsmith.rl.algorithms.losses.supervised import MixChordLoss, MixLoss, OpmdLoss, SftIsLoss, SftLoss, SftPhiLoss
from tinsmith.rl.algorithms.losses.user_code import CustomLoss

LossConfig = Annotated[
    PpoLoss
    | ImportanceSamplingLoss
    | GspoLoss
    | CispoLoss
    | SapoLoss
    | ToprLoss
    | SppoLoss
    | RecLoss
    | OpmdLoss
    | SftLoss
    | SftIsLoss
    | SftPhiLoss
    | DpoLoss
    | IpoLoss
    | KtoLoss
    | OrpoLoss
    | SimpoLoss
    | BradleyTerryLoss
    | MixLoss
    | MixChordLoss
    | DroLoss
    | TopKDistillLoss
    | CustomLoss,
    Field(discriminator="type"),
]
