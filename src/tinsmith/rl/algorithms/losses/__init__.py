"""The table of policy losses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.algorithms.losses.policy_gradient import (
    Cispo,
    Dro,
    Gspo,
    ImportanceSampling,
    Ppo,
    Rec,
    Sapo,
    Sppo,
    Topr,
)
from tinsmith.rl.algorithms.losses.preference import Dpo
from tinsmith.rl.algorithms.losses.supervised import Mix, MixChord, Opmd, Sft, SftIs, SftPhi

LossConfig = Annotated[
    Ppo | ImportanceSampling | Gspo | Cispo | Sapo | Topr | Sppo | Rec | Opmd | Sft | SftIs | SftPhi | Dpo | Mix
    | MixChord | Dro,
    Field(discriminator="type"),
]  # fmt: skip
