"""The keys of a TOML file of minds_RL, with its defaults.

A key without an annotation is translated by the function that lists it in `translates`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tinsmith.dialects.base import Copied, Section

Arguments = dict[str, Any]


class MindsEnvironment(Section):
    """`env`, a single environment."""

    id: str
    args: Arguments = Field(default_factory=dict)


class MindsComponent(Section):
    """An entry of `envs`, a mixture of environments."""

    id: str
    name: str = ""
    weight: float | None = Field(default=None, ge=0)
    ratio: float | None = Field(default=None, ge=0)
    args: Arguments = Field(default_factory=dict)


class MindsArguments(Section):
    """`trainer.args`."""

    max_new_tokens: Annotated[int, Copied("sampling.max_tokens")] = Field(default=2048, ge=1)


class MindsTrainer(Section):
    """`trainer`."""

    rollouts_per_example: int = Field(default=4, ge=1)
    groups_per_batch: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    total_batches: int | None = Field(default=None, ge=1)
    num_batches: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=3.162e-6, gt=0)
    loss_fn: str = "importance_sampling"
    training_rank: Annotated[int, Copied("model.rank")] = Field(default=32, ge=1)
    async_off_policy_steps: int = Field(default=2, ge=0)
    stream_minibatches: int = Field(default=4, ge=1)
    save_every: Annotated[int, Copied("checkpoint.every")] = Field(default=20, ge=0)
    eval_every: Annotated[int, Copied("eval.every")] = Field(default=0, ge=0)
    seed: Annotated[int, Copied("seed")] = Field(default=0, ge=0)
    args: MindsArguments = MindsArguments()


class MindsModel(Section):
    """`model`."""

    base_model: Annotated[str, Copied("model.name")] = Field(min_length=1)
    renderer_name: str = ""
    renderer: str = ""


class MindsTinker(Section):
    """`tinker`."""

    api_key_env: Annotated[str, Copied("model.api_key_env")] = Field(default="TINKER_API_KEY", min_length=1)


class MindsFile(Section):
    """A file of minds_RL."""

    env: MindsEnvironment | None = None
    envs: tuple[MindsComponent, ...] = ()
    trainer: MindsTrainer = MindsTrainer()
    model: MindsModel
    tinker: MindsTinker = MindsTinker()
