"""RunSettings, the keys of a run file. The settings classes of its sections are defined next to their code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator
from typing_extensions import override

from tinsmith.engine_options import DeviceOptions
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.updates import UpdatesConfig
from tinsmith.rl.callbacks import CustomCallback
from tinsmith.rl.config.checkpoints import CheckpointConfig, check_resume_from
from tinsmith.rl.data.demonstrations import DemonstrationsConfig
from tinsmith.rl.data.tasks import TasksConfig
from tinsmith.rl.ending.duration import Duration
from tinsmith.rl.ending.until import UntilConfig
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.environments.registry import SECTIONS, EnvironmentConfig
from tinsmith.rl.environments.tasks import TopLevelEnvironment
from tinsmith.rl.evaluate import BenchConfig, EvalConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.record.monitors import MonitorConfig
from tinsmith.rl.record.monitors.console import ConsoleConfig
from tinsmith.rl.record.monitors.report import ReportConfig
from tinsmith.rl.rewards import RewardConfig
from tinsmith.rl.rollouts.backoff import BackoffConfig
from tinsmith.rl.rollouts.buffer import BufferConfig, MemoryConfig
from tinsmith.rl.rollouts.filters import FilterConfig
from tinsmith.rl.rollouts.runner import RolloutConfig
from tinsmith.rl.rollouts.weights import SyncConfig
from tinsmith.rl.workflows import WorkflowConfig
from tinsmith.rl.workflows.single_turn import SingleTurnConfig
from tinsmith.settings import Needs, Settings

ROLLOUTS = Needs(
    "uses_rollouts", reason="with algorithm.type: {0.algorithm.type}, which samples no rollouts", hint="leave it out"
)
"""Marks a field that has an effect only on runs that sample rollouts."""


class OwnService(DeviceOptions):
    """The service that is started for a run without a base URL. Not used with a base URL: then the server decides."""

    source: str = ""
    """Hub id, folder or GGUF file to serve as model.name; empty: model.name itself."""
    engine: Literal["torch", "fake"] = "torch"
    """`torch` runs a model; `fake` computes numbers without one, for tests and for dry runs of a file, whose other
    settings of the service are then not used."""


class Stage(Settings):
    """One stage of a run. Keys of the run file given here replace the whole section of the run."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the stage: of its folder, in messages and metrics."""
    keep_optimizer: bool = False
    """Continue with the optimizer state of the previous stage; false: a fresh optimizer."""


class RunSettings(Settings):
    """The fields of a run file."""

    mode: Literal["both", "explore", "train", "bench"] = "both"
    """`both` samples and trains, `explore` samples into a buffer, `train` trains from a buffer that another process
    fills, `bench` compares checkpoints on the held-out tasks."""
    sampler: Annotated[str, Needs("mode", ("explore",))] = Field(
        default="", max_length=30, pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$"
    )
    """Name of this process, where several processes of mode explore sample for one run, on one machine or on many. A
    process that is started again goes on with the batches of its name."""
    model: ModelConfig
    tasks: TasksConfig = TasksConfig()
    environments: tuple[EnvironmentConfig, ...] = ()
    """Environments to train and evaluate on, each with its own tasks, workflow, rewards and sampling, in place of
    `tasks`, `workflow` and `rewards` (docs/train/environments.md)."""
    plugins: str = ""
    """A Python file, or a folder of them, with parts of your own (docs/code/extend.md). Relative to the run file, or
    else, and on the command line, to the working directory."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward functions. The reward is their weighted sum plus the workflow's own reward. Not needed with a teacher
    (on_policy_distill, jsd)."""
    demonstrations: DemonstrationsConfig | None = None
    """Demonstrations to train on: alone (sft, cpt, dpo and others on pairs) or with rollouts (mix, mix_chord)."""
    steps: int = Field(default=0, ge=0)
    """Steps: batches that are sampled and trained on; 0: derived from `epochs`. Each is one optimizer step unless
    `updates` divides it."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, in place of steps: floor(tasks x epochs / groups_per_step) steps, or, with demonstrations
    alone, floor(rows x epochs / demonstrations.per_step). If `steps` is set too, the smaller number counts."""
    until: UntilConfig | None = None
    """Conditions that end the run, or a stage of it, before its last step."""
    time_limit: Duration | None = None
    """Stop after this time, in seconds or as in 5h50m, with a checkpoint that the same command continues from: for jobs
    of limited time. Rollouts that are not finished after `grace_period` are sampled again then."""
    grace_period: float = Field(default=60.0, ge=0)
    """When the run stops early, at time_limit or at SIGTERM: seconds that rollouts in flight have to finish."""
    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per step; each task is one group."""
    group_size: Annotated[int, ROLLOUTS] = Field(default=8, ge=1)
    """Rollouts per task, which form one group."""
    staleness: Annotated[
        int,
        ROLLOUTS,
        Needs("sync.style", unless=("live",), hint="set buffer.capacity for how far sampling may run ahead"),
    ] = Field(default=0, ge=0)
    """Batches sampled ahead of training, which is the largest number of steps that a rollout is off-policy with
    sync.interval 1 (interval I adds I - 1): 0 is synchronous, 1 overlaps sampling and training. `max_steps_off_policy`
    is another name of this key."""
    allow_high_staleness: Annotated[bool, ROLLOUTS] = False
    """Accept a staleness above 8, which costs more quality than it saves time."""
    backoff: Annotated[BackoffConfig | Literal["auto"] | None, ROLLOUTS] = "auto"
    """Back off when training is too far off-policy. `auto` does by the bounds below from staleness 1 on, in runs whose
    sampler returns the probabilities of the policy (temperature 1, no top_p or top_k); null never does."""
    sync: Annotated[
        SyncConfig,
        ROLLOUTS,
        Needs("sync.style", ("on_publish", "live"), key="publish_every", hint="set sync.interval"),
    ] = SyncConfig()
    buffer: Annotated[
        BufferConfig,
        ROLLOUTS,
        Needs("sync.style", unless=("fixed",), key="capacity", hint="set staleness for how far sampling runs ahead"),
    ] = MemoryConfig()
    rollout: Annotated[
        RolloutConfig,
        Needs("sync.style", unless=("fixed",), key="over.ratio", hint="choose another sync.style"),
    ] = RolloutConfig()
    filters: Annotated[tuple[FilterConfig, ...], ROLLOUTS] = ()
    """Filters of rollouts and groups before training, applied in order."""
    filter_refills: Annotated[int, ROLLOUTS] = Field(default=0, ge=0)
    """Largest number of additional batches to sample until groups_per_step groups pass the filters; the run fails if
    they still do not. 0: train on the groups that pass."""
    min_partial_groups: Annotated[int, ROLLOUTS, Needs("filter_refills")] = Field(default=0, ge=0)
    """Sample additional batches also until this many groups that pass have right and wrong rollouts, and train on all
    groups that pass. A rollout is right as in an evaluation (eval.threshold)."""
    sampling: SamplingConfig = SamplingConfig()
    workflow: WorkflowConfig = SingleTurnConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    updates: Annotated[
        UpdatesConfig,
        Needs(
            "uses_rollouts",
            key="stream",
            reason="with algorithm.type: {0.algorithm.type}, which samples no rollouts",
            hint="leave it out",
        ),
    ] = UpdatesConfig()
    eval: EvalConfig = EvalConfig()
    bench: BenchConfig = BenchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitors: tuple[MonitorConfig, ...] = (ConsoleConfig(), ReportConfig())
    """Monitors, in addition to the files of the run folder."""
    callbacks: Annotated[tuple[CustomCallback, ...], Needs("mode", ("both", "train"), hint="leave it out")] = ()
    """Code of your own that is called as the run starts and ends, and after steps and evaluations
    (docs/code/extend.md)."""
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

    @property
    def uses_rollouts(self) -> bool:
        """Whether the algorithm trains on rollouts of the policy."""
        return self.algorithm.learns_from in ("rollouts", "both")

    @property
    def trains_on_tasks(self) -> bool:
        """Whether training tasks are drawn, by this process or another one of the run."""
        return self.uses_rollouts and self.mode != "bench"

    @property
    def samples(self) -> bool:
        """Whether this process samples training rollouts."""
        return self.uses_rollouts and self.mode in ("both", "explore")

    @property
    def all_environments(self) -> tuple[EnvironmentOptions, ...]:
        """The environments of the run: those listed, or one of the top-level tasks, workflow and rewards."""
        listed = tuple(entry.resolved for entry in self.environments)
        return listed or (TopLevelEnvironment.of(self.tasks, self.workflow, self.rewards),)

    @property
    def trained(self) -> tuple[EnvironmentOptions, ...]:
        """Environments to train on: those with a weight."""
        return tuple(each for each in self.all_environments if each.weight)

    @property
    def active_backoff(self) -> BackoffConfig | None:
        """The bounds of backing off; None if the run never does."""
        if self.backoff != "auto":
            return self.backoff
        samplings = [each.sampling_of(self.sampling) for each in self.trained]
        exact = all(sampling.temperature == 1 and not sampling.restricts for sampling in samplings)
        admits = self.mode == "both" and self.sync.style == "fixed" and self.staleness > 0
        return BackoffConfig() if exact and admits and self.algorithm.learns_from == "rollouts" else None

    @property
    def sections(self) -> Mapping[str, Settings]:
        """Sections that environments share, by key."""
        return {name: value for name, value in self if name in SECTIONS}

    @property
    def evaluated(self) -> Mapping[str, EnvironmentOptions]:
        """The environment of each set of held-out tasks, as it evaluates them, by the name of the set."""
        parts = [(each.title or source, each) for each in self.all_environments for source in each.held_out_sources]
        settings = {name: self.eval.of_source(name) for name, _ in parts}
        return {name: each.evaluated_with(settings[name].workflow, settings[name].rewards) for name, each in parts}

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out tasks and rewards for all of them."""
        return bool(self.evaluated) and all(each.provides_rewards for each in self.evaluated.values())

    @property
    def not_evaluated(self) -> str:
        """Why held-out tasks of the run are not evaluated; empty if they are, or if there are none."""
        titles = [title for each in self.all_environments for title in each.group_rewards]
        if self.evaluates or not (self.evaluated and titles):
            return ""
        return (
            f"{titles[0]} compares the replies of a group, and an evaluation has one reply to a task: set eval.rewards"
        )

    @property
    def evaluates_anything(self) -> bool:
        """Whether an evaluation measures anything: held-out tasks, functions or benchmarks."""
        return self.evaluates or bool(self.eval.functions or self.eval.benchmarks)

    @property
    def shares_a_run(self) -> bool:
        """Whether this process is one of several that share the run: some sample, another one trains."""
        return self.mode in ("explore", "train") and self.uses_rollouts

    @field_validator("resume_from")
    @classmethod
    def _check_checkpoint(cls, resume_from: str) -> str:
        check_resume_from(resume_from)
        return resume_from

    @override
    def checks_needs(self) -> bool:
        return not self.stages and self.mode != "bench"
