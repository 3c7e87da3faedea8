"""RunConfig, the schema of a run file. The settings classes of its sections are defined next to their code.

Example:

    model: {name: HuggingFaceTB/SmolLM2-135M-Instruct, rank: 16}
    tasks: {train: {type: addition}}
    rewards: [{type: closeness}]
    sampling: {max_tokens: 8}
    steps: 60
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from typing_extensions import override

from tinsmith.engine_options import DeviceOptions
from tinsmith.errors import ConfigError
from tinsmith.rl import plugins
from tinsmith.rl.algorithms import AlgorithmConfig
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage
from tinsmith.rl.algorithms.advantages.multi_turn import StepWiseGrpoAdvantage
from tinsmith.rl.algorithms.config import DATA_ONLY
from tinsmith.rl.data.demonstrations import DemonstrationsConfig
from tinsmith.rl.data.tasks import TasksConfig
from tinsmith.rl.evaluate import BenchConfig, EvalConfig
from tinsmith.rl.monitors import MonitorConfig
from tinsmith.rl.monitors.console import ConsoleConfig
from tinsmith.rl.monitors.report import ReportConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.base import ModelConfig, SamplingConfig
from tinsmith.rl.rewards import RewardConfig
from tinsmith.rl.rollouts.buffers import BufferConfig
from tinsmith.rl.rollouts.buffers.memory import MemoryConfig
from tinsmith.rl.rollouts.filters import FilterConfig
from tinsmith.rl.rollouts.runner import RolloutConfig
from tinsmith.rl.rollouts.weight_sync import SyncConfig
from tinsmith.rl.run_folder import CheckpointConfig, check_resume_from
from tinsmith.rl.workflows import WorkflowConfig
from tinsmith.rl.workflows.single_turn import SingleTurnConfig
from tinsmith.settings import Needs, Settings, build, explicit_values

_ROLLOUTS = Needs(
    "uses_rollouts", reason="with algorithm.type: {0.algorithm.type}, which samples no rollouts", hint="leave it out"
)
_OF_THE_RUN = ("model", "service", "stages", "folder", "resume", "resume_from")
"""Keys that a stage cannot set."""


def _check_kept_optimizers(stages: Sequence[Stage], modes: Sequence[str]) -> None:
    """Raises ValueError for a stage with keep_optimizer that no training stage precedes."""
    trains = [mode != "bench" for mode in modes]
    for at, stage in enumerate(stages):
        if stage.keep_optimizer and not (trains[at] and any(trains[:at])):
            why = "no stage trains before it" if trains[at] else "mode bench trains nothing"
            raise ValueError(f"stage {stage.name}: {why}, so there is no optimizer to keep; leave out keep_optimizer")


def _inherited(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The run's keys that a stage with the keys `own` inherits: without keys of rollouts if the stage samples none."""
    algorithm = own.get("algorithm", values.get("algorithm"))
    kind = algorithm.get("type") if isinstance(algorithm, Mapping) else None
    if kind not in DATA_ONLY:
        return dict(values)
    fields = RunConfig.model_fields
    return {name: part for name, part in values.items() if _ROLLOUTS not in fields[name].metadata}


def _current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the former name of `demonstrations` replaced."""
    current = {key: value for key, value in values.items() if key != "experts"}
    if isinstance(older := values.get("experts"), Mapping):
        newer = current.get("demonstrations")
        current["demonstrations"] = {**(newer if isinstance(newer, Mapping) else {}), **older}
    elif older is not None:
        current["demonstrations"] = older
    return current


class OwnService(DeviceOptions):
    """The service that is started for a run without a base URL. Not used with a base URL: then the server decides."""

    source: str = ""
    """Hub id, folder or GGUF file to serve as model.name; empty: model.name itself."""
    engine: Literal["torch", "fake"] = "torch"
    """`torch` runs a model; `fake` computes numbers without one, for tests and for dry runs of a file."""


class Stage(Settings):
    """One stage of a run. Keys of the run file given here replace the whole section of the run."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the stage: of its folder, in messages and metrics."""
    keep_optimizer: bool = False
    """Continue with the optimizer state of the previous stage; false: a fresh optimizer."""


class RunConfig(Settings):
    """The settings of a run."""

    model_config = ConfigDict(serialize_by_alias=True)

    mode: Literal["both", "explore", "train", "bench"] = "both"
    """`both` samples and trains, `explore` samples into a buffer, `train` trains from a buffer that another process
    fills, `bench` compares checkpoints on the held-out tasks."""
    model: ModelConfig
    tasks: TasksConfig = TasksConfig()
    plugins: str = ""
    """A folder of Python files with workflows and rewards of your own (docs/guides/workflows-and-rewards.md)."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions. The reward is their weighted sum plus the workflow's own reward. Not needed with a teacher
    (on_policy_distill, jsd)."""
    demonstrations: DemonstrationsConfig | None = Field(default=None, serialization_alias="experts")
    """Demonstrations to train on: alone (sft, cpt, dpo) or together with rollouts (mix, mix_chord)."""
    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0: derived from `epochs`."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, in place of steps: floor(tasks x epochs / groups_per_step) steps, or, with demonstrations
    alone, floor(rows x epochs / demonstrations.per_step). If `steps` is set too, the smaller number counts."""
    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per step; each task is one group."""
    group_size: Annotated[int, _ROLLOUTS] = Field(default=8, ge=1)
    """Rollouts per task, which form one group."""
    staleness: Annotated[
        int,
        _ROLLOUTS,
        Needs("sync.style", unless=("live",), hint="set buffer.capacity for how far sampling may run ahead"),
    ] = Field(default=0, ge=0)
    """Batches sampled ahead of training: 0 is synchronous, 1 overlaps sampling and training."""
    sync: Annotated[
        SyncConfig,
        _ROLLOUTS,
        Needs("sync.style", ("on_publish", "live"), key="publish_every", hint="set sync.interval"),
    ] = SyncConfig()
    buffer: Annotated[
        BufferConfig,
        _ROLLOUTS,
        Needs("sync.style", unless=("fixed",), key="capacity", hint="set staleness for how far sampling runs ahead"),
    ] = MemoryConfig()
    rollout: Annotated[
        RolloutConfig,
        Needs("sync.style", unless=("fixed",), key="over.ratio", hint="choose another sync.style"),
    ] = RolloutConfig()
    filters: Annotated[tuple[FilterConfig, ...], _ROLLOUTS] = ()
    """Filters of rollouts and groups before training, applied in order."""
    filter_refills: Annotated[int, _ROLLOUTS] = Field(default=0, ge=0)
    """Largest number of additional batches to sample until groups_per_step groups pass the filters; the run fails if
    they still do not. 0: train on the groups that pass."""
    min_partial_groups: Annotated[int, _ROLLOUTS, Needs("filter_refills")] = Field(default=0, ge=0)
    """Sample additional batches also until this many groups that pass have right and wrong rollouts, and train on all
    groups that pass. A rollout is right as in an evaluation (eval.threshold)."""
    sampling: SamplingConfig = SamplingConfig()
    workflow: WorkflowConfig = SingleTurnConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    bench: BenchConfig = BenchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitors: tuple[MonitorConfig, ...] = (ConsoleConfig(), ReportConfig())
    """Monitors, in addition to the files of the run folder."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level written to log.txt."""
    seed: int = Field(default=0, ge=0)
    """Seed of the adapter, the order of tasks and every sampling request."""
    concurrency: int = Field(default=256, ge=1)
    """Largest number of requests to the server at once, for replies or logprobs: of rollouts, evaluations, judges,
    references and teachers. Others wait. A request for several replies to one prompt counts as one."""
    name: str = ""
    """Name of the run; empty: the run file's name."""
    description: str = ""
    """Description of the run, shown in the report."""
    folder: str = ""
    """Folder of the run; empty: runs/NAME."""
    resume: bool | Literal["rename"] = True
    """`true` resumes the run in the folder, `false` refuses a folder that holds a run, `rename` starts a new run in
    FOLDER_YYYYmmddHHMMSS."""
    resume_from: str = ""
    """Checkpoint to continue from, with its optimizer, step and position in the data: a tinker://RUN/weights/NAME path,
    or its state file FOLDER/checkpoints/step-000010.json. A run goes back to a checkpoint of its own once; a new folder
    continues any other. For weights without the rest, set model.load_from."""
    service: OwnService = OwnService()
    stages: tuple[Stage, ...] = ()
    """Runs to make one after the other, each from the weights of the previous one."""

    @model_validator(mode="after")
    def _check_stages(self) -> RunConfig:
        names = [stage.name for stage in self.stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {twice[0]}; give each a name of its own")
        modes = [self.stage_config(number).mode for number in range(1, len(self.stages) + 1)]
        if modes and set(modes) == {"bench"}:
            raise ValueError("no stage trains; take mode bench for the whole run, without stages")
        _check_kept_optimizers(self.stages, modes)
        return self

    def stage_config(self, number: int, state: str = "tinker://the/stage/before") -> RunConfig:
        """Settings of stage `number`, counted from 1, as a run that starts from the weights at `state`.

        The first stage and stages of mode bench ignore `state`. Raises ConfigError that names the stage.
        """
        stage, own = self.stages[number - 1], _current_keys(self.stages[number - 1].model_extra or {})
        if fixed := sorted(own.keys() & set(_OF_THE_RUN)):
            raise ConfigError(
                f"stage {stage.name}: {fixed[0]} cannot differ between stages.", f"Set {fixed[0]} outside of stages."
            )
        if own.get("mode") == "explore":
            raise ConfigError(
                f"stage {stage.name}: mode explore needs a second process that trains, which a stage cannot be.",
                "Leave out mode to sample and train, or run the stage's settings as a run of its own.",
            )
        values = {name: part for name, part in explicit_values(self).items() if name not in ("stages", "name")}
        if own.keys() & {"steps", "epochs"}:
            values = {name: part for name, part in values.items() if name not in ("steps", "epochs")}
        if number > 1 and state and own.get("mode") != "bench":
            shape = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
            model = {name: part for name, part in values["model"].items() if name not in shape}
            values["model"] = {**model, "load_from": state}
        values["folder"] = str(Path(self.folder or f"runs/{self.name}") / f"{number:02}-{stage.name}")
        values["name"] = f"{self.name} {stage.name}".strip()
        return build(RunConfig, {**_inherited(values, own), **own}, f"stage {stage.name}")

    @property
    def uses_rollouts(self) -> bool:
        """Whether the algorithm trains on rollouts of the policy."""
        return self.algorithm.learns_from in ("rollouts", "both")

    @property
    def samples(self) -> bool:
        """Whether this process samples training rollouts."""
        return self.uses_rollouts and self.mode in ("both", "explore")

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out tasks and rewards for all of them."""
        names = self.tasks.eval if isinstance(self.tasks.eval, dict) else {"": None}
        have_rewards = all(
            settings.rewards or self.rewards or (settings.workflow or self.workflow).provides_rewards
            for settings in map(self.eval.of_source, names)
        )
        return self.tasks.evaluates and have_rewards

    @model_validator(mode="after")
    def _check_data(self) -> RunConfig:
        if self.stages or self.mode == "bench":
            return self
        kind, learns_from = self.algorithm.type, self.algorithm.learns_from
        if self.samples and not self.tasks.sources:
            raise ValueError(f"tasks.train is missing: {kind} trains on replies to tasks; set tasks.train")
        if (
            self.samples
            and self.algorithm.advantage.reads_rewards
            and not (self.rewards or self.workflow.provides_rewards)
        ):
            raise ValueError("rewards is missing: no reward function scores the rollouts; set rewards")
        if learns_from != "rollouts" and self.demonstrations is None:
            raise ValueError(f"demonstrations is missing: {kind} trains on demonstrations; set demonstrations.data")
        if learns_from == "rollouts" and self.demonstrations is not None:
            raise ValueError(
                f"demonstrations is not used with {kind}; leave it out, or set algorithm.type to sft, dpo or mix"
            )
        if kind == "cpt" and self.demonstrations is not None and self.demonstrations.learn != "text":
            raise ValueError("cpt trains on plain text; set demonstrations.learn to text, or algorithm.type to sft")
        if learns_from == "pairs" and self.demonstrations is not None and self.demonstrations.learn == "text":
            raise ValueError(f"{kind} compares replies to a chat, not plain text; leave out demonstrations.learn")
        return self

    @override
    def checks_needs(self) -> bool:
        return not self.stages and self.mode != "bench"

    @model_validator(mode="after")
    def _check_steps(self) -> RunConfig:
        if self.stages:
            return self
        if not self.steps and self.epochs is None and self.mode != "bench":
            raise ValueError("steps is missing; set steps or epochs")
        if self.mode == "train" and self.uses_rollouts and not self.tasks.sources and not self.steps:
            raise ValueError(
                "steps is missing: epochs count passes over tasks, and this run of mode train has none; set steps"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _apply_plugins(cls, values: Any) -> Any:
        return plugins.apply_plugins(_current_keys(values)) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_refills(self) -> RunConfig:
        if self.filter_refills and not (self.filters or self.min_partial_groups):
            raise ValueError(
                "filter_refills is not used without filters; set filters or min_partial_groups, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> RunConfig:
        if not self.stages and self.samples and (fault := self.algorithm.sampling_fault(self.sampling)):
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> RunConfig:
        if self.stages or self.mode == "bench":
            return self
        if self.algorithm.reference == "start" and not self.model.load_from:
            raise ValueError("algorithm.reference: start needs model.load_from; a new adapter equals the base model")
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> RunConfig:
        if self.stages:
            return self
        advantage = self.algorithm.advantage
        if (
            self.group_size == 1
            and isinstance(advantage, GrpoAdvantage | StepWiseGrpoAdvantage)
            and advantage.std_threshold is not None
        ):
            raise ValueError("group_size 1 leaves no rollouts to compare; set it to 2 or more, or use a critic (ppo)")
        if self.samples and advantage.reads_states and not self.workflow.provides_states:
            raise ValueError(
                f"{advantage.type} compares turns by state, and workflow {self.workflow.type} sets none; use "
                "multi_turn or custom, or algorithm.advantage {type: step_wise_grpo}, which compares whole rollouts"
            )
        return self

    @property
    def shares_a_run(self) -> bool:
        """Whether this process is one of two that share the run: one samples, the other trains."""
        return self.mode in ("explore", "train") and self.uses_rollouts

    @model_validator(mode="after")
    def _check_mode(self) -> RunConfig:
        if self.stages and self.mode in ("explore", "bench"):
            raise ValueError(f"mode {self.mode} has no stages; run the settings of one stage with its folder")
        if self.mode == "explore" and not self.uses_rollouts:
            raise ValueError(
                f"mode explore samples rollouts, which {self.algorithm.type} does not use; set mode to train"
            )
        if self.mode == "bench" and not self.evaluates:
            raise ValueError("mode bench needs held-out tasks and rewards; set tasks.eval and rewards")
        if self.shares_a_run and not self.stages and self.buffer.type == "memory":
            raise ValueError(
                f"mode {self.mode} is one of two processes that share a buffer; set buffer.type to file or sql"
            )
        if self.shares_a_run and self.sync.method == "memory":
            raise ValueError(
                f"mode {self.mode}: another process cannot open weights in memory; set sync.method to checkpoint"
            )
        if self.shares_a_run and self.resume == "rename":
            raise ValueError(
                f"mode {self.mode} is one of two processes that share the run's folder, so resume cannot be rename; "
                "to start a new run, set another folder in both files"
            )
        return self

    @field_validator("resume_from")
    @classmethod
    def _check_checkpoint(cls, resume_from: str) -> str:
        check_resume_from(resume_from)
        return resume_from

    @model_validator(mode="after")
    def _check_resume_from(self) -> RunConfig:
        if not self.resume_from:
            return self
        if self.stages:
            raise ValueError("resume_from needs a run without stages; run the settings of one stage with its folder")
        if self.mode == "bench" or self.shares_a_run:
            raise ValueError(f"resume_from is not used with mode {self.mode}; set mode to both")
        if self.uses_rollouts and self.buffer.type != "memory":
            raise ValueError(
                f"resume_from needs buffer.type memory; a buffer of type {self.buffer.type} no longer has the batches "
                "that a checkpoint waited for"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunConfig:
        if self.stages:
            return self
        has_settings = bool(self.eval.model_fields_set)
        if has_settings and self.tasks.evaluates and not self.evaluates:
            raise ValueError("eval needs rewards; set rewards or eval.rewards")
        if has_settings and not self.tasks.evaluates:
            raise ValueError("eval needs held-out tasks; set tasks.held_out or tasks.eval, or leave out eval")
        names = self.tasks.eval if isinstance(self.tasks.eval, dict) else {}
        if unknown := sorted(self.eval.sources.keys() - names.keys()):
            raise ValueError(f"eval.sources.{unknown[0]}: tasks.eval has no source with this name")
        self.eval.check_threshold(self.rewards)
        return self
