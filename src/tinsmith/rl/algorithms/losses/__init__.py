"""The table of policy losses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.algorithms.losses.clipped import Cispo, Dro, Gspo, ImportanceSampling, Ppo, Rec, Sapo, Sppo, Topr
from tinsmith.rl.algorithms.losses.likelihood import Opmd, Sft, SftIs, SftPhi
from tinsmith.rl.algorithms.losses.mixed import Mix, MixChord
from tinsmith.rl.algorithms.losses.preference import Dpo

LossConfig = Annotated[
    Ppo | ImportanceSampling | Gspo | Cispo | Sapo | Topr | Sppo | Rec | Opmd | Sft | SftIs | SftPhi | Dpo | Mix
    | MixChord | Dro,
    Field(discriminator="type"),
]  # fmt: skip
