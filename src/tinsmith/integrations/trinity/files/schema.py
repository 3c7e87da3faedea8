"""The keys of a Trinity-RFT file: the top level, and the sections `algorithm`, `data_processor`, `service` and `log`.

An unknown key is refused, and the error names the nearest known one. A key without an annotation is translated by the
function that lists it in `translates`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.dialects.base import Copied, Ignored, Refused, Section
from tinsmith.integrations.trinity.files.schema_buffer import SET_BY_TRINITY, BufferSection
from tinsmith.integrations.trinity.files.schema_runtime import (
    Cluster,
    Explorer,
    ModelSection,
    Monitor,
    Synchronizer,
    Trainer,
)

DATA_JUICER = Refused(
    "Data-Juicer is not included.",
    "Process the data beforehand; or convert this file (tinsmith config convert) and set operators on tasks.train.",
)
Arguments = dict[str, Any]


class Optimizer(Section):
    """`algorithm.optimizer`."""

    lr: Annotated[float, Copied("optimizer.learning_rate")] = 1e-06
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    warmup_style: str | None = None
    lr_scheduler_type: str = "constant"
    optimizer_type: Annotated[str, Refused("the Tinker API offers AdamW only.", "Leave it out, or write adam.")] = (
        "adam"
    )
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, Copied("optimizer.weight_decay")] = 0.01
    clip_grad: Annotated[float, Ignored("trainer.grad_clip sets the clipping, as in Trinity.")] = 1.0


class Algorithm(Section):
    """`algorithm`."""

    algorithm_type: str = "ppo"
    repeat_times: int | None = None
    optimizer: Optimizer = Optimizer()
    sample_strategy: str | None = None
    sample_strategy_args: Arguments | None = None
    advantage_fn: str | None = None
    advantage_fn_args: Arguments | None = None
    kl_penalty_fn: str | None = None
    kl_penalty_fn_args: Arguments | None = None
    policy_loss_fn: str | None = None
    policy_loss_fn_args: Arguments | None = None
    kl_loss_fn: str | None = None
    kl_loss_fn_args: Arguments | None = None
    entropy_loss_fn: str | None = None
    entropy_loss_fn_args: Arguments | None = None
    loss_agg_mode: str | None = None
    enable_router_replay: bool = False
    bypass_old_logprobs: bool = True
    rollout_correction: Arguments | None = None


class Operator(Section):
    """An entry of `operators`."""

    name: str = ""
    args: Arguments = Field(default_factory=dict)


class ExperiencePipeline(Section):
    """`data_processor.experience_pipeline`."""

    operators: tuple[Operator, ...] = ()
    save_input: Annotated[bool, Ignored("the run folder holds every rollout.")] = True
    input_save_path: Annotated[str | None, Ignored("the run folder holds every rollout.")] = None
    inputs: Annotated[
        Arguments, Refused("a run samples all its rollouts itself.", "Mix data in as algorithm.sample_strategy mix.")
    ] = Field(default_factory=dict)
    output: Annotated[Arguments | None, Ignored(SET_BY_TRINITY)] = None


class TaskPipeline(Section):
    """`data_processor.task_pipeline`."""

    operators: Annotated[tuple[Arguments, ...], DATA_JUICER] = ()
    num_process: Annotated[int, Ignored("there is no task pipeline here.")] = 4
    config_path: Annotated[str | None, DATA_JUICER] = None
    inputs: Annotated[tuple[str, ...], DATA_JUICER] = ()
    output: Annotated[Arguments | None, DATA_JUICER] = None
    target_fields: Annotated[tuple[str, ...], Ignored("there is no task pipeline here.")] = ()
    priority_weights: Annotated[dict[str, float], Ignored("there is no task pipeline here.")] = Field(
        default_factory=dict
    )
    top_k: Annotated[int, Ignored("there is no task pipeline here.")] = -1


class DataProcessor(Section):
    """`data_processor`."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()
    task_pipeline: TaskPipeline | None = None


class DataJuicer(Section):
    """`service.data_juicer`."""

    server_url: Annotated[str | None, DATA_JUICER] = None
    auto_start: Annotated[bool, DATA_JUICER] = False
    port: Annotated[int | None, Ignored("there is no task pipeline here.")] = None


class Service(Section):
    """`service`."""

    data_juicer: DataJuicer | None = None


class Log(Section):
    """`log`."""

    level: str = "INFO"
    group_by_node: Annotated[bool, Ignored("one process writes the log.")] = False
    save_dir: Annotated[str, Ignored(SET_BY_TRINITY)] = ""


class TrinityFile(Section):
    """A whole file."""

    mode: Literal["both", "explore", "train", "bench", "colocate", "serve"] = "both"
    project: str = "Trinity-RFT"
    group: str = ""
    name: str = "rft"
    checkpoint_root_dir: str = ""
    checkpoint_job_dir: Annotated[str, Ignored(SET_BY_TRINITY)] = ""
    ray_namespace: Annotated[str, Ignored("there is no Ray here.")] = ""
    continue_from_checkpoint: bool = True
    ignore_validator_suggestions: Annotated[
        bool, Ignored("the file is checked for errors only; there are no suggestions.")
    ] = False
    algorithm: Algorithm = Algorithm()
    data_processor: DataProcessor = DataProcessor()
    model: ModelSection = ModelSection()
    cluster: Cluster = Cluster()
    buffer: BufferSection = BufferSection()
    explorer: Explorer = Explorer()
    trainer: Trainer = Trainer()
    monitor: Monitor = Monitor()
    synchronizer: Synchronizer = Synchronizer()
    service: Service = Service()
    log: Log = Log()
    stages: tuple[Arguments, ...] = ()


MARKS = frozenset({"explorer", "trainer", "synchronizer", "cluster", "data_processor", "checkpoint_root_dir"})
"""Top-level keys that Trinity's files have and Tinsmith's run files do not."""
