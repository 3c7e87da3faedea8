"""Trinity's keys under `buffer`, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.dialects.base import Honoured, NoMeaning, Refused, Section

AUTO = "Trinity sets it by itself."
LESSON = NoMeaning("it is about data to learn from as it stands; a task is asked.")
WHOLE = NoMeaning("every task of an evaluation is tried, so their order does not count.")
READER = "a file is read whole when the run begins."
Arguments = dict[str, Any]


class Format(Section):
    """`format` of a taskset: how a row becomes a task."""

    prompt_type: Annotated[Literal["messages", "plaintext"], LESSON] = "messages"
    prompt_key: Annotated[str, Honoured("tasks.*.prompt; a field that holds a chat is one")] = "prompt"
    response_key: Annotated[str, Honoured("tasks.*.answer; not set, rows may lack it where no reward reads it")] = (
        "response"
    )
    system_prompt_key: Annotated[str | None, Honoured("tasks.*.system_key")] = None
    system_prompt: Annotated[str | None, Honoured("tasks.*.system")] = None
    messages_key: Annotated[str, LESSON] = "message"
    tools_key: Annotated[str, NoMeaning("tools of rows are read by workflows that use them.")] = "tools"
    image_key: Annotated[str | None, Refused("models with images are not served.", "Leave it out.")] = None
    video_key: Annotated[str | None, Refused("models with video are not served.", "Leave it out.")] = None
    reply_prefix: Annotated[str | None, Honoured("tasks.*.reply_prefix")] = None
    workflow_key: Annotated[str, Refused("a run has one workflow.", "Set default_workflow_type.")] = ""
    reward_fn_key: Annotated[str, Refused("a run has one set of rewards.", "Set default_reward_fn_type.")] = ""
    chosen_key: Annotated[str, LESSON] = "chosen"
    rejected_key: Annotated[str, LESSON] = "rejected"
    enable_concatenated_multi_turn: Annotated[bool, LESSON] = False
    chat_template: Annotated[str | None, Honoured("model.chat_template; a run has one")] = None
    enable_thinking: Annotated[
        bool | None, Honoured("model.chat_template_values.enable_thinking; a run has one")
    ] = None  # fmt: skip


class LessonFormat(Format):
    """`format` of a buffer of data to learn from."""

    prompt_type: Annotated[
        Literal["messages", "plaintext"], Honoured("experts.data: which of the keys below count")
    ] = "messages"
    messages_key: Annotated[str, Honoured("experts.data.prompt, with prompt_type messages")] = "message"
    prompt_key: Annotated[str, Honoured("experts.data.prompt, with prompt_type plaintext")] = "prompt"
    response_key: Annotated[str, Honoured("experts.data.reply, with prompt_type plaintext")] = "response"
    chosen_key: Annotated[str, Honoured("experts.data.chosen, for dpo")] = "chosen"
    rejected_key: Annotated[str, Honoured("experts.data.rejected, for dpo")] = "rejected"
    enable_concatenated_multi_turn: Annotated[bool, Honoured("experts.learn: all")] = False
    tools_key: Annotated[str, Honoured("experts.data.tools_key, of chats")] = "tools"
    reply_prefix: Annotated[str | None, NoMeaning("a lesson holds the whole reply.")] = None


class Sampling(Section):
    """`rollout_args` of a taskset."""

    temperature: Annotated[float | None, Honoured("sampling.temperature, eval.temperature")] = None
    top_p: Annotated[float | None, Honoured("sampling.top_p")] = None
    top_k: Annotated[int, Honoured("sampling.top_k")] = -1
    logprobs: Annotated[int | None, NoMeaning("the sampled token's logprob is what is trained on.")] = None
    max_tokens: Annotated[int | None, Honoured("sampling.max_tokens, eval.max_tokens")] = None
    n: Annotated[int, NoMeaning("repeat_times says how many.")] = 1


class EvalSampling(Sampling):
    """`rollout_args` of an entry of `eval_tasksets`."""

    top_p: Annotated[float | None, Honoured("eval.top_p")] = None
    top_k: Annotated[int, Honoured("eval.top_k")] = -1


class Selector(Section):
    """`data_selector` of a taskset."""

    selector_type: Annotated[str | None, Honoured("tasks.order")] = "sequential"
    seed: Annotated[int, NoMeaning("the order is drawn from the run's seed, explorer.rollout_model.seed.")] = 42
    feature_keys: Annotated[tuple[str, ...], Honoured("tasks.order")] = ()
    kwargs: Annotated[Arguments, Honoured("tasks.order")] = Field(default_factory=dict)


class EvalSelector(Selector):
    """`data_selector` of an entry of `eval_tasksets`: every task is tried."""

    selector_type: Annotated[str | None, WHOLE] = "sequential"
    seed: Annotated[int, WHOLE] = 42
    feature_keys: Annotated[tuple[str, ...], WHOLE] = ()
    kwargs: Annotated[Arguments, WHOLE] = Field(default_factory=dict)


class Replay(Section):
    """`replay_buffer` of a queue."""

    enable: Annotated[bool, Honoured("buffer.replay.enable")] = False
    priority_fn: Annotated[
        str, Honoured("buffer.replay.priority: linear_decay, or linear_decay_limited (decay_limit_randomization)")
    ] = "linear_decay"
    reuse_cooldown_time: Annotated[float | None, Honoured("buffer.replay.cooldown; null uses each batch once")] = None
    priority_fn_args: Annotated[
        Arguments, Honoured("buffer.replay: decay, limit (use_count_limit), sigma; over the defaults")
    ] = Field(default_factory=lambda: {"decay": 2.0})


class Stored(Section):
    """What tasksets and buffers share."""

    name: Annotated[str, NoMeaning("it counts for tables of a database and for eval_tasksets alone.")] = ""
    path: Annotated[str | None, Honoured("tasks.*.name or path")] = None
    split: Annotated[str, Honoured("tasks.*.split")] = "train"
    subset_name: Annotated[str | None, Honoured("tasks.*.subset")] = None
    max_retry_times: Annotated[int, NoMeaning("a database is asked again by its driver.")] = 3
    max_retry_interval: Annotated[int, NoMeaning("a database is asked again by its driver.")] = 1
    enable_progress_bar: Annotated[bool | None, NoMeaning(READER)] = False
    index: Annotated[int, NoMeaning(AUTO)] = 0
    batch_size: Annotated[int, NoMeaning(AUTO)] = 0
    total_epochs: Annotated[int, NoMeaning(AUTO)] = 1
    total_steps: Annotated[int | None, NoMeaning(AUTO)] = None
    ray_namespace: Annotated[str | None, NoMeaning("there is no Ray here.")] = None


class Asked(Stored):
    """What tasksets share."""

    format: Format = Format()

    storage_type: Annotated[Literal["file", "sql"], Honoured("tasks.*.type")] = "file"
    default_workflow_type: Annotated[str | None, Honoured("workflow")] = None
    default_reward_fn_type: Annotated[str | None, Honoured("rewards")] = None
    workflow_args: Annotated[Arguments, Honoured("workflow; arguments of code of your own too")] = Field(
        default_factory=dict
    )
    reward_fn_args: Annotated[Arguments, Honoured("rewards; arguments of code of your own too")] = Field(
        default_factory=dict
    )
    is_eval: Annotated[bool, NoMeaning(AUTO)] = False


class Taskset(Asked):
    """`taskset`, and an entry of `tasksets`."""

    repeat_times: Annotated[int, NoMeaning("algorithm.repeat_times is what counts for training.")] = 1
    rollout_args: Sampling = Sampling()
    task_selector: Selector | None = None
    data_selector: Selector = Selector()


class EvalTaskset(Asked):
    """An entry of `eval_tasksets`."""

    repeat_times: Annotated[int, Honoured("eval.num_samples")] = 1
    rollout_args: EvalSampling = EvalSampling()
    task_selector: EvalSelector | None = None
    data_selector: EvalSelector = EvalSelector()


class Buffer(Stored):
    """`experience_buffer`, and an entry of `auxiliary_buffers`."""

    path: Annotated[str | None, Honoured("experts.data; buffer.path or buffer.url of rollouts")] = None
    storage_type: Annotated[
        Literal["queue", "file", "sql"],
        Honoured(
            "experts.data.type; buffer.type of rollouts, where queue is memory, and a file in modes of two processes"
        ),
    ] = "queue"
    format: LessonFormat = LessonFormat()
    capacity: Annotated[int, Honoured("buffer.capacity; buffer.replay.size where batches are used again")] = 10000
    max_read_timeout: Annotated[float, Honoured("sync.timeout, in mode train")] = 1800
    replay_buffer: Replay | None = Replay()
    data_selector: Selector = Selector()
    schema_type: Annotated[str | None, NoMeaning(AUTO)] = None
    tokenizer_path: Annotated[str | None, NoMeaning(AUTO)] = None


class ExplorerInput(Section):
    """`buffer.explorer_input`."""

    taskset: Taskset | None = None
    tasksets: tuple[Taskset, ...] = ()
    eval_tasksets: tuple[EvalTaskset, ...] = ()
    default_workflow_type: Annotated[str | None, Honoured("workflow")] = None
    default_eval_workflow_type: Annotated[str | None, Honoured("eval.workflow")] = None
    default_reward_fn_type: Annotated[str | None, Honoured("rewards")] = None


class TrainerInput(Section):
    """`buffer.trainer_input`."""

    experience_buffer: Buffer | None = None
    auxiliary_buffers: dict[str, Buffer] = Field(default_factory=dict)


class Buffers(Section):
    """`buffer`."""

    batch_size: Annotated[int, Honoured("groups_per_step")] = 1
    train_batch_size: Annotated[
        int, Honoured("groups_per_step, when divided by repeat_times; not where it counts turns")
    ] = 0
    total_epochs: Annotated[int, Honoured("epochs")] = 1
    total_steps: Annotated[int | None, Honoured("steps")] = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
    explorer_output: Annotated[Arguments | None, NoMeaning(AUTO)] = None
    tokenizer_path: Annotated[str | None, NoMeaning(AUTO)] = None
    cache_dir: Annotated[str | None, NoMeaning(AUTO)] = None
