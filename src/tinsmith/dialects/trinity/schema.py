"""Every key of Trinity-RFT's files: its sections together, and what stands at the top.

A key that is not here is refused with the nearest name. Leaves out what the fates' code does (`translate.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.dialects.base import Honoured, NoMeaning, Refused, Section
from tinsmith.dialects.trinity.keys_algorithm import Algorithm
from tinsmith.dialects.trinity.keys_explorer import Explorer
from tinsmith.dialects.trinity.keys_trainer import Monitor, Synchronizer, Trainer
from tinsmith.dialects.trinity.schema_buffer import AUTO, Buffers
from tinsmith.dialects.trinity.schema_runtime import Cluster, Model

JUICER = Refused(
    "Data-Juicer is not part of this.",
    "Process the data beforehand; or convert this file (tinsmith config convert) and set operators on tasks.train.",
)
STAGES = Honoured(
    "stages: whole sections in place of the file's; each from the weights before, its optimizer fresh; chat template "
    "and precision are one for all"
)
MODES = "mode: both (colocate too), explore, train, bench; serve is a command of its own, tinsmith serve"
Arguments = dict[str, Any]


class Operator(Section):
    """An entry of `operators`."""

    name: Annotated[str, Honoured("filters; operators that are not filters are refused by name")] = ""
    args: Annotated[Arguments, Honoured("filters")] = Field(default_factory=dict)


class ExperiencePipeline(Section):
    """`data_processor.experience_pipeline`."""

    operators: tuple[Operator, ...] = ()
    save_input: Annotated[bool, NoMeaning("every rollout is in the run folder.")] = True
    input_save_path: Annotated[str | None, NoMeaning("every rollout is in the run folder.")] = None
    inputs: Annotated[
        Arguments, Refused("rollouts come from one place.", "Mix data in as algorithm.sample_strategy mix.")
    ] = Field(default_factory=dict)
    output: Annotated[Arguments | None, NoMeaning(AUTO)] = None


class TaskPipeline(Section):
    """`data_processor.task_pipeline`."""

    operators: Annotated[tuple[Arguments, ...], JUICER] = ()
    num_process: Annotated[int, NoMeaning("no task pipeline runs here.")] = 4
    config_path: Annotated[str | None, JUICER] = None
    inputs: Annotated[tuple[str, ...], JUICER] = ()
    output: Annotated[Arguments | None, JUICER] = None
    target_fields: Annotated[tuple[str, ...], NoMeaning("no task pipeline runs here.")] = ()
    priority_weights: Annotated[dict[str, float], NoMeaning("no task pipeline runs here.")] = Field(
        default_factory=dict
    )
    top_k: Annotated[int, NoMeaning("no task pipeline runs here.")] = -1


class DataProcessor(Section):
    """`data_processor`."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()
    task_pipeline: TaskPipeline | None = None


class DataJuicer(Section):
    """`service.data_juicer`."""

    server_url: Annotated[str | None, JUICER] = None
    auto_start: Annotated[bool, JUICER] = False
    port: Annotated[int | None, NoMeaning("no task pipeline runs here.")] = None


class Service(Section):
    """`service`."""

    data_juicer: DataJuicer | None = None


class Log(Section):
    """`log`."""

    level: Annotated[str, Honoured("log_level: of log.txt in the run's folder")] = "INFO"
    group_by_node: Annotated[bool, NoMeaning("one process writes.")] = False
    save_dir: Annotated[str, NoMeaning(AUTO)] = ""


class TrinityFile(Section):
    """A whole file."""

    mode: Annotated[Literal["both", "explore", "train", "bench", "colocate", "serve"], Honoured(MODES)] = "both"
    project: Annotated[str, Honoured("folder: checkpoint_root_dir/project/group/name")] = "Trinity-RFT"
    group: Annotated[str, Honoured("folder")] = ""
    name: Annotated[str, Honoured("name, folder")] = "rft"
    checkpoint_root_dir: Annotated[str, Honoured("folder")] = ""
    checkpoint_job_dir: Annotated[str, NoMeaning(AUTO)] = ""
    ray_namespace: Annotated[str, NoMeaning("there is no Ray here.")] = ""
    continue_from_checkpoint: Annotated[bool, Honoured("resume; false is rename, as in Trinity")] = True
    ignore_validator_suggestions: Annotated[bool, NoMeaning("what must be mended is told, and nothing else.")] = False
    algorithm: Algorithm = Algorithm()
    data_processor: DataProcessor = DataProcessor()
    model: Model = Model()
    cluster: Cluster = Cluster()
    buffer: Buffers = Buffers()
    explorer: Explorer = Explorer()
    trainer: Trainer = Trainer()
    monitor: Monitor = Monitor()
    synchronizer: Synchronizer = Synchronizer()
    service: Service = Service()
    log: Log = Log()
    stages: Annotated[tuple[Arguments, ...], STAGES] = ()


MARKS = frozenset({"explorer", "trainer", "synchronizer", "cluster", "data_processor", "checkpoint_root_dir"})
"""A file with one of these at its top is Trinity's: ours has none of them."""

__all__ = ["MARKS", "TrinityFile"]
