"""The keys of rLLM's `tinker_rl_trainer.yaml`, with those that later versions added.

A key without an annotation is translated by the function that lists it in `translates`. Values are those of the file;
where null stands for another key, the translation says which.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tinsmith.dialects.base import Copied, Ignored, Refused, Section

WHOLE_BATCHES = Refused(
    "a step of this trainer is one gradient over all its groups.",
    "Set 1; a Tinsmith run has updates.stream for a gradient in parts, and updates.minibatches for several steps.",
)
IN_CODE = Refused("an agent or environment takes its arguments from the script.", "Pass them in workflow_args.")
OWN_LIMIT = Ignored("a workflow limits its turns itself, with its own arguments.")
FROM_SAMPLER = "messages become tokens by the model's chat template, and replies keep their own tokens."
ALL_AT_ONCE = "held-out tasks are evaluated together; rollout.concurrency bounds how many at a time."
BUILT_IN = "rLLM's configurations are built in."
RUN_FOLDER = "the files of a run are in its run folder."
Arguments = dict[str, Any]


class RllmModel(Section):
    """`model`."""

    name: Annotated[str, Copied("model.name")] = "Qwen/Qwen3-8B"
    lora_rank: Annotated[int, Copied("model.rank")] = 32
    train_unembed: Annotated[bool, Copied("model.train_unembed")] = True
    train_attn: Annotated[bool, Copied("model.train_attn")] = True
    train_mlp: Annotated[bool, Copied("model.train_mlp")] = True


class RllmTraining(Section):
    """`training`."""

    group_size: int | None = 16
    val_group_size: int | None = 1
    learning_rate: Annotated[float, Copied("optimizer.learning_rate")] = 2e-5
    beta1: Annotated[float, Copied("optimizer.beta1")] = 0.9
    beta2: Annotated[float, Copied("optimizer.beta2")] = 0.95
    eps: Annotated[float, Copied("optimizer.eps")] = 1e-8
    max_length: int = 32768
    num_minibatches: Annotated[int, WHOLE_BATCHES] = 1


class RllmSampling(Section):
    """`sampling`."""

    temperature: float | None = 0.6
    top_p: float | None = 0.95


class RllmValidationSampling(Section):
    """`val_sampling`; null is the value of `sampling` and `data`."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


class RllmTeacher(Section):
    """`algorithm.teacher_rollout_args`, with adv_estimator distill."""

    backend: str = "openai"
    model: str = "deepseek-ai/DeepSeek-Math-V2"
    base_url: str | None = "http://localhost:8000/v1"
    api_key: Annotated[str | None, Ignored("the teacher is on the run's server, with the run's key.")] = "EMPTY"
    max_prompt_length: Annotated[int | None, Ignored("the teacher reads what the policy has read and written.")] = 32768


class RllmAlgorithm(Section):
    """`algorithm`."""

    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 0.95
    norm_adv_by_std_in_grpo: bool = False
    grouping_level: str = "trajectory"
    remove_constant_reward_groups: bool = False
    clip_advantages: bool = False
    adv_clip_min: float | None = -5.0
    adv_clip_max: float | None = 5.0
    shared_tokenizer: bool = False
    teacher_rollout_args: RllmTeacher = RllmTeacher()


class RllmWorkflow(Section):
    """`workflow`. The keys `path` and `args` are Tinsmith's own."""

    n_parallel_tasks: int = 256
    retry_limit: int = 3
    path: str = ""
    args: Arguments = Field(default_factory=dict)


class RllmAgent(Section):
    """`agent`, of agents with environments."""

    max_steps: int = 1
    agent_args: Arguments = Field(default_factory=dict)


class RllmEnvironment(Section):
    """`env`, of agents with environments."""

    env_args: Arguments = Field(default_factory=dict)


class RllmEngine(Section):
    """`rollout_engine`."""

    reasoning_effort: str = "medium"
    accumulate_reasoning: bool = False
    disable_thinking: bool = False
    bypass_render_with_parser: Annotated[bool, Ignored(FROM_SAMPLER)] = False
    renderer_name: str | None = None


class RllmData(Section):
    """`data`."""

    train_files: str | None = None
    val_files: str | None = None
    max_prompt_length: int = 2048
    max_response_length: int = 2048
    train_batch_size: int = 64
    val_batch_size: Annotated[int, Ignored(ALL_AT_ONCE)] = 32


class RllmTrainer(Section):
    """`trainer`."""

    total_epochs: int | float = 10
    logger: tuple[str, ...] | str = ("console",)
    project_name: str = "rllm-tinker"
    experiment_name: str = "default"
    test_freq: int = 5
    save_freq: int = 20
    val_before_train: bool = True
    default_local_dir: str = "/tmp/rllm-tinker-checkpoints"
    resume_from_tinker_id: str | None = None


class HydraRun(Section):
    """`hydra.run`."""

    dir: Annotated[str, Ignored(RUN_FOLDER)] = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"


class HydraSettings(Section):
    """`hydra`: Hydra's own settings."""

    run: HydraRun = HydraRun()
    output_subdir: Annotated[str | None, Ignored(RUN_FOLDER)] = None
    job: Annotated[Arguments, Ignored("the working folder and the log stay as they are.")] = Field(default_factory=dict)
    searchpath: Annotated[tuple[str, ...], Ignored(BUILT_IN)] = ()


class RllmFile(Section):
    """A whole file."""

    tinker_base_url: str | None = None
    model: RllmModel = RllmModel()
    training: RllmTraining = RllmTraining()
    sampling: RllmSampling = RllmSampling()
    val_sampling: RllmValidationSampling = RllmValidationSampling()
    algorithm: RllmAlgorithm = RllmAlgorithm()
    workflow: RllmWorkflow = RllmWorkflow()
    agent: RllmAgent = RllmAgent()
    env: RllmEnvironment = RllmEnvironment()
    rollout_engine: RllmEngine = RllmEngine()
    data: RllmData = RllmData()
    trainer: RllmTrainer = RllmTrainer()
    hydra: HydraSettings = HydraSettings()
    defaults: tuple[Any, ...] = ()
