"""The keys of a Trinity-RFT file under `buffer`: tasksets, and buffers of rollouts and demonstrations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.dialects.base import Ignored, Refused, Section

SET_BY_TRINITY = "Trinity sets this key itself."
DEMONSTRATIONS_ONLY = Ignored("it applies to demonstrations, not to tasks.")
EVERY_TASK = Ignored("an evaluation runs every task, so their order has no effect.")
READ_WHOLE = "a file is read whole at the start of the run."
Arguments = dict[str, Any]


class TaskFormat(Section):
    """`format` of a taskset: how a row becomes a task."""

    prompt_type: Annotated[Literal["messages", "plaintext"], DEMONSTRATIONS_ONLY] = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt_key: str | None = None
    system_prompt: str | None = None
    messages_key: Annotated[str, DEMONSTRATIONS_ONLY] = "message"
    tools_key: Annotated[str, Ignored("workflows that use tools read them from the row.")] = "tools"
    image_key: str | None = None
    video_key: Annotated[str | None, Refused("video models are not supported.", "Leave it out.")] = None
    reply_prefix: str | None = None
    workflow_key: Annotated[str, Refused("a run has one workflow.", "Set default_workflow_type.")] = ""
    reward_fn_key: Annotated[str, Refused("a run has one set of rewards.", "Set default_reward_fn_type.")] = ""
    chosen_key: Annotated[str, DEMONSTRATIONS_ONLY] = "chosen"
    rejected_key: Annotated[str, DEMONSTRATIONS_ONLY] = "rejected"
    enable_concatenated_multi_turn: Annotated[bool, DEMONSTRATIONS_ONLY] = False
    chat_template: str | None = None
    enable_thinking: bool | None = None


class DemonstrationFormat(TaskFormat):
    """`format` of a buffer of demonstrations."""

    reply_prefix: Annotated[str | None, Ignored("a demonstration holds the whole reply.")] = None
    image_key: Annotated[str | None, Refused("demonstrations take no images.", "Leave it out.")] = None


class RolloutArguments(Section):
    """`rollout_args` of a taskset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    logprobs: Annotated[int | None, Ignored("the logprob of the sampled token is always recorded.")] = None
    max_tokens: int | None = None
    n: Annotated[int, Ignored("repeat_times sets the number of replies.")] = 1


class EvalRolloutArguments(RolloutArguments):
    """`rollout_args` of an entry of `eval_tasksets`."""


class DataSelector(Section):
    """`data_selector` of a taskset."""

    selector_type: str | None = "sequential"
    seed: Annotated[int, Ignored("the order depends on the run's seed, explorer.rollout_model.seed.")] = 42
    feature_keys: tuple[str, ...] = ()
    kwargs: Arguments = Field(default_factory=dict)


class EvalDataSelector(DataSelector):
    """`data_selector` of an entry of `eval_tasksets`: an evaluation runs every task."""

    selector_type: Annotated[str | None, EVERY_TASK] = "sequential"
    seed: Annotated[int, EVERY_TASK] = 42
    feature_keys: Annotated[tuple[str, ...], EVERY_TASK] = ()
    kwargs: Annotated[Arguments, EVERY_TASK] = Field(default_factory=dict)


class ReplayBuffer(Section):
    """`replay_buffer` of a queue."""

    enable: bool = False
    priority_fn: str = "linear_decay"
    reuse_cooldown_time: float | None = None
    priority_fn_args: Arguments = Field(default_factory=lambda: {"decay": 2.0})


class StoredData(Section):
    """Keys of tasksets and buffers."""

    name: Annotated[str, Ignored("only database tables and eval_tasksets use it.")] = ""
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    max_retry_times: Annotated[int, Ignored("the database driver retries.")] = 3
    max_retry_interval: Annotated[int, Ignored("the database driver retries.")] = 1
    enable_progress_bar: Annotated[bool | None, Ignored(READ_WHOLE)] = False
    index: Annotated[int, Ignored(SET_BY_TRINITY)] = 0
    batch_size: Annotated[int, Ignored(SET_BY_TRINITY)] = 0
    total_epochs: Annotated[int, Ignored(SET_BY_TRINITY)] = 1
    total_steps: Annotated[int | None, Ignored(SET_BY_TRINITY)] = None
    ray_namespace: Annotated[str | None, Ignored("there is no Ray here.")] = None


class TasksetBase(StoredData):
    """Keys of tasksets."""

    format: TaskFormat = TaskFormat()
    storage_type: Literal["file", "sql"] = "file"
    default_workflow_type: str | None = None
    default_reward_fn_type: str | None = None
    workflow_args: Arguments = Field(default_factory=dict)
    reward_fn_args: Arguments = Field(default_factory=dict)
    is_eval: Annotated[bool, Ignored(SET_BY_TRINITY)] = False


class Taskset(TasksetBase):
    """`taskset`, and an entry of `tasksets`."""

    repeat_times: Annotated[int, Ignored("training uses algorithm.repeat_times.")] = 1
    rollout_args: RolloutArguments = RolloutArguments()
    task_selector: DataSelector | None = None
    data_selector: DataSelector = DataSelector()


class EvalTaskset(TasksetBase):
    """An entry of `eval_tasksets`."""

    repeat_times: int = 1
    rollout_args: EvalRolloutArguments = EvalRolloutArguments()
    task_selector: EvalDataSelector | None = None
    data_selector: EvalDataSelector = EvalDataSelector()


class ExperienceBuffer(StoredData):
    """`experience_buffer`, and an entry of `auxiliary_buffers`."""

    path: str | None = None
    storage_type: Literal["queue", "file", "sql"] = "queue"
    format: DemonstrationFormat = DemonstrationFormat()
    capacity: int = 10000
    max_read_timeout: float = 1800
    replay_buffer: ReplayBuffer | None = ReplayBuffer()
    data_selector: DataSelector = DataSelector()
    schema_type: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    tokenizer_path: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None


class ExplorerInput(Section):
    """`buffer.explorer_input`."""

    taskset: Taskset | None = None
    tasksets: tuple[Taskset, ...] = ()
    eval_tasksets: tuple[EvalTaskset, ...] = ()
    default_workflow_type: str | None = None
    default_eval_workflow_type: str | None = None
    default_reward_fn_type: str | None = None


class TrainerInput(Section):
    """`buffer.trainer_input`."""

    experience_buffer: ExperienceBuffer | None = None
    auxiliary_buffers: dict[str, ExperienceBuffer] = Field(default_factory=dict)


class BufferSection(Section):
    """`buffer`."""

    batch_size: int = 1
    train_batch_size: int = 0
    total_epochs: int = 1
    total_steps: int | None = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
    explorer_output: Annotated[Arguments | None, Ignored(SET_BY_TRINITY)] = None
    tokenizer_path: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    cache_dir: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
