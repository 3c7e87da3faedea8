"""Environments: tasks, the workflow that solves them, and their rewards, under one name. A run may mix several.

Each environment is a settings class derived from `EnvironmentOptions`; a run file selects one by its `type`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.environments.custom import CustomEnvironment
from tinsmith.rl.environments.introspection.deception import Deception
from tinsmith.rl.environments.introspection.entropy_intuition import EntropyIntuition
from tinsmith.rl.environments.introspection.ghost_trace import GhostTrace
from tinsmith.rl.environments.introspection.gradient_choice import GradientChoice
from tinsmith.rl.environments.introspection.gradient_intuition import GradientIntuition
from tinsmith.rl.environments.introspection.gradient_prophet import GradientProphet
from tinsmith.rl.environments.introspection.sanity_check import SanityCheck
from tinsmith.rl.environments.introspection.self_prediction import SelfPrediction
from tinsmith.rl.environments.tasks import TasksEnvironment
from tinsmith.rl.environments.verifiers import VerifiersEnvironment
from tinsmith.rl.environments.verifiers.legacy import VerifiersLegacyEnvironment

EnvironmentConfig = Annotated[
    TasksEnvironment
    | VerifiersEnvironment
    | VerifiersLegacyEnvironment
    | GhostTrace
    | GradientProphet
    | SelfPrediction
    | SanityCheck
    | Deception
    | EntropyIntuition
    | GradientIntuition
    | GradientChoice
    | CustomEnvironment,
    Field(discriminator="type"),
]
