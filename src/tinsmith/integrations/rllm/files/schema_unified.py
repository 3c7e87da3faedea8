"""The keys of rLLM's `unified.yaml`: the tree `rllm`, and the settings of its Tinker backend beside it.

Keys of `tinker_rl_trainer` that the unified configuration has dropped, and those of its first versions, are read as
well, after the newer ones. Keys that stand in two places are listed in `values.MIRRORS`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from tinsmith.dialects.base import Copied, Ignored, Refused, Section
from tinsmith.integrations.rllm.files.schema import (
    ALL_AT_ONCE,
    FROM_SAMPLER,
    IN_CODE,
    OWN_LIMIT,
    Arguments,
    HydraSettings,
    RllmAgent,
    RllmAlgorithm,
    RllmData,
    RllmEngine,
    RllmModel,
    RllmSampling,
    RllmTrainer,
    RllmTraining,
    RllmValidationSampling,
    RllmWorkflow,
)

NOT_SAMPLED = Refused("the Tinker API does not offer it.", "Leave it out.")
NO_SANDBOX = Ignored("rollouts run in the process of the run; there are no sandboxes.")
OWN_ENDPOINT = Ignored("agents reach the policy through an endpoint of the run, on a free port of this machine.")
NO_SUCH_REASON = Ignored("such a rollout ends with an error or a timeout here: mask_error, mask_timeout.")
REMOTE = Ignored("it has an effect only with a remote runtime, which is not supported.")
ON_DISK = Ignored("batches wait in memory; buffer.type: file of a Tinsmith run keeps them on disk.")
GIVEN_IN_CODE = Ignored("the workflow is the class that the script names, or workflow.path.")
STORED = Ignored("every rollout is stored in the run folder.")


class UnifiedData(Section):
    """`rllm.data`."""

    train_batch_size: int = 64
    val_batch_size: Annotated[int, Ignored(ALL_AT_ONCE)] = -1
    max_prompt_length: int = 2048
    max_response_length: int = 30720
    seed: int = 0


class UnifiedAgent(Section):
    """`rllm.agent`."""

    name: Annotated[str, GIVEN_IN_CODE] = "math_agent"
    max_steps: Annotated[int, OWN_LIMIT] = 20
    trajectory_timeout: float | None = None
    overlong_filter: bool = False
    agent_args: Annotated[Arguments, IN_CODE] = Field(default_factory=dict)
    engine_args: Annotated[Arguments, IN_CODE] = Field(default_factory=dict)


class UnifiedEnvironment(Section):
    """`rllm.env`."""

    name: Annotated[str, GIVEN_IN_CODE] = "custom"
    env_args: Annotated[Arguments, IN_CODE] = Field(default_factory=dict)


class WorkflowArguments(Section):
    """`rllm.workflow.workflow_args`."""

    agent_cls: Annotated[str | None, IN_CODE] = None
    agent_args: Annotated[Arguments, IN_CODE] = Field(default_factory=dict)
    env_cls: Annotated[str | None, IN_CODE] = None
    env_args: Annotated[Arguments, IN_CODE] = Field(default_factory=dict)
    timeout: float = 1e6
    gamma: float = 0.0
    reward_bonus_coeff: float = 0.0


class UnifiedWorkflow(Section):
    """`rllm.workflow`."""

    use_workflow: Annotated[bool, GIVEN_IN_CODE] = False
    name: Annotated[str, GIVEN_IN_CODE] = "single_turn_workflow"
    workflow_args: WorkflowArguments = WorkflowArguments()
    n_parallel_tasks: int = 256
    retry_limit: int = 3
    raise_on_error: Annotated[
        bool, Ignored("a rollout that fails is stored with its error and left out; the run goes on.")
    ] = True
    warm_queue_size: Annotated[int, NO_SANDBOX] = -1


class RolloutSampling(Section):
    """`rllm.rollout.train` and `rllm.rollout.val`; max_tokens of null is max_response_length."""

    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    max_tokens: int | None = None
    min_p: Annotated[float | None, NOT_SAMPLED] = None
    presence_penalty: Annotated[float | None, NOT_SAMPLED] = None
    frequency_penalty: Annotated[float | None, NOT_SAMPLED] = None
    repetition_penalty: Annotated[float | None, NOT_SAMPLED] = None


class UnifiedRollout(Section):
    """`rllm.rollout`; n and n_val of null are training.group_size and validation.group_size, or 8 and 1."""

    n: int | None = None
    n_val: int | None = None
    train: RolloutSampling = RolloutSampling()
    val: RolloutSampling = RolloutSampling()


class UnifiedTrainer(Section):
    """`rllm.trainer`."""

    total_epochs: int | float = 10
    total_batches: int = -1
    logger: tuple[str, ...] | str = ("console",)
    project_name: str = "rllm-training"
    experiment_name: str = "default"
    test_freq: int = 5
    save_freq: int = 20
    val_before_train: bool = False
    val_only: bool = False
    dump_batch_dir: Annotated[str | None, STORED] = None


class RolloutCorrection(Section):
    """`rllm.algorithm.rollout_correction`."""

    bypass_mode: bool | None = True
    tis_mode: str | None = None
    tis_cap: float = 2.0


class UnifiedAlgorithm(Section):
    """`rllm.algorithm`."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    use_rllm: Annotated[bool | None, Ignored("there is one implementation of each estimator.")] = None
    use_precomputed_advantage: bool = False
    loss_fn: str | None = None
    env_loss_coef: Annotated[
        float | None, Refused("tokens of the environment are not trained on.", "Leave it out, or write 0.")
    ] = None
    loss_agg_mode: str | None = None
    lr_schedule: str = "constant"
    warmup_steps: int = -1
    warmup_steps_ratio: float = 0.0
    kl_beta: float = 0.0
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    gamma: float | None = None
    lam: float | None = None
    clip_advantages: bool = False
    adv_clip_min: float | None = -5.0
    adv_clip_max: float | None = 5.0
    router_replay: str | bool = "disabled"
    rollout_correction: RolloutCorrection = RolloutCorrection()


class StepwiseAdvantage(Section):
    """`rllm.stepwise_advantage`."""

    enable: bool = False
    mode: str = "broadcast"
    normalize_by_steps: bool = False


class CompactFiltering(Section):
    """`rllm.compact_filtering`."""

    enable: bool = False
    mask_max_prompt_length_exceeded: bool = True
    mask_max_response_length_exceeded: bool = True
    mask_env_done: bool = False
    mask_max_turns_exceeded: bool = True
    mask_timeout: bool = True
    mask_unknown: Annotated[bool, Ignored("a rollout that ends without a reason is done: mask_env_done.")] = False
    mask_error: bool = True
    mask_verifier_timeout: Annotated[bool, NO_SUCH_REASON] = True
    mask_grading_error: Annotated[bool, NO_SUCH_REASON] = True
    mask_sandbox_error: Annotated[bool, NO_SUCH_REASON] = True
    mask_agent_setup_timeout: Annotated[bool, NO_SUCH_REASON] = True
    mask_env_start_timeout: Annotated[bool, NO_SUCH_REASON] = True
    mask_model_error: Annotated[bool, NO_SUCH_REASON] = True


class RejectionSample(Section):
    """`rllm.rejection_sample`."""

    enable: bool = False
    multiplier: int = 1
    min_partial_solve_tasks: int = 1
    min_trajs_per_group: int = 2
    filter_uniform_groups: bool = False


class RemoteRuntime(Section):
    """`rllm.remote_runtime`."""

    enabled: Annotated[
        bool, Refused("rollouts run in the process of the run, not in a remote runtime.", "Leave it out.")
    ] = False
    backend: Annotated[str, REMOTE] = "agentcore"
    agentcore: Annotated[Arguments, REMOTE] = Field(default_factory=dict)
    harbor: Annotated[Arguments, REMOTE] = Field(default_factory=dict)
    backend_config: Annotated[Arguments, REMOTE] = Field(default_factory=dict)
    session_timeout: Annotated[float, REMOTE] = 300.0


class Gateway(Section):
    """`rllm.gateway`."""

    port: Annotated[int, OWN_ENDPOINT] = 9090
    host: Annotated[str | None, OWN_ENDPOINT] = None
    num_workers: Annotated[int, OWN_ENDPOINT] = 0
    public_url: Annotated[str | None, NO_SANDBOX] = None
    sampling_params_priority: Annotated[
        str, Ignored("an agent's own sampling parameters are used where it sets them, else those of the run.")
    ] = "client"
    tunnel: Annotated[str | None, NO_SANDBOX] = None
    store: Annotated[str, STORED] = "memory"
    db_path: Annotated[str | None, STORED] = None
    cumulative_token_mode: Annotated[bool, Ignored(FROM_SAMPLER)] = False
    renderer_family: Annotated[str, Ignored(FROM_SAMPLER)] = "auto"
    tokenizer_model: Annotated[str | None, Ignored("the tokenizer is that of the model.")] = "${model.name}"


class AsyncTraining(Section):
    """`rllm.async_training`."""

    enable: bool = False
    mini_batch_size: int = 64
    fwd_bwd_group_size: Annotated[
        int | None, Ignored("the gradient of a step covers all its groups, however the server splits them.")
    ] = None
    staleness_threshold: float = 0.0
    trigger_parameter_sync_step: int = 1
    partial_rollout: bool = False
    episode_offload_dir: Annotated[str | None, ON_DISK] = None
    trajectory_group_offload_dir: Annotated[str | None, ON_DISK] = None


class LogRollouts(Section):
    """`rllm.episode_logging`."""

    log_episodes: Annotated[bool, STORED] = False
    episode_log_dir: Annotated[str, STORED] = "logs/${rllm.trainer.project_name}/${rllm.trainer.experiment_name}"


class RllmSettings(Section):
    """`rllm`."""

    backend: str = "tinker"
    data: UnifiedData = UnifiedData()
    agent: UnifiedAgent = UnifiedAgent()
    env: UnifiedEnvironment = UnifiedEnvironment()
    workflow: UnifiedWorkflow = UnifiedWorkflow()
    rollout: UnifiedRollout = UnifiedRollout()
    trainer: UnifiedTrainer = UnifiedTrainer()
    algorithm: UnifiedAlgorithm = UnifiedAlgorithm()
    stepwise_advantage: StepwiseAdvantage = StepwiseAdvantage()
    disable_thinking: bool = False
    accumulate_reasoning: bool = False
    mask_truncated_samples: bool = False
    filter_token_mismatch: Annotated[
        bool, Ignored("tokens and logprobs are the sampler's own, so they always match.")
    ] = True
    compact_filtering: CompactFiltering = CompactFiltering()
    rejection_sample: RejectionSample = RejectionSample()
    remote_runtime: RemoteRuntime = RemoteRuntime()
    gateway: Gateway = Gateway()
    sdk: Annotated[
        Arguments, Ignored("agents reach the policy through an endpoint of the run, which records them.")
    ] = Field(default_factory=dict)
    async_training: AsyncTraining = AsyncTraining()
    episode_logging: LogRollouts = LogRollouts()
    sandbox_backend: Annotated[Any, Refused("there are no sandboxes.", "Run the agent in the process of the run.")] = (
        None
    )
    sandbox_concurrency: Annotated[int | None, NO_SANDBOX] = None


class TinkerTraining(RllmTraining):
    """`training` beside `rllm`."""

    group_size: int | None = None
    val_group_size: int | None = None
    weight_decay: Annotated[float | None, Copied("optimizer.weight_decay")] = None
    grad_clip_norm: Annotated[float | None, Copied("optimizer.grad_clip_norm")] = None
    lr_schedule: str = "constant"
    warmup_steps_ratio: float = 0.0
    default_local_dir: str = "checkpoints/${rllm.trainer.project_name}/${rllm.trainer.experiment_name}"
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    resume_from_tinker_id: str | None = None


class TinkerValidation(Section):
    """`validation`."""

    group_size: int | None = None


class OlderSampling(RolloutSampling):
    """`sampling.train` and `sampling.val`."""

    temperature: float | None = None
    top_p: float | None = None


class TinkerSampling(RllmSampling):
    """`sampling` of older versions: for training and validation, or for each."""

    temperature: float | None = None
    top_p: float | None = None
    train: OlderSampling = OlderSampling()
    val: OlderSampling = OlderSampling()


class TinkerData(RllmData):
    """`data` beside `rllm`."""

    max_prompt_length: int = 30720
    max_response_length: int = 2048
    train_batch_size: int = 32


class UnifiedFile(Section):
    """A whole file."""

    rllm: RllmSettings = RllmSettings()
    tinker_base_url: str | None = None
    fuse_forward_backward_and_optim_step: Annotated[
        bool, Ignored("how the requests of a step overlap changes no result.")
    ] = False
    model: RllmModel = RllmModel()
    training: TinkerTraining = TinkerTraining()
    validation: TinkerValidation = TinkerValidation()
    workflow: RllmWorkflow = RllmWorkflow()
    agent: RllmAgent = RllmAgent()
    rollout_engine: RllmEngine = RllmEngine()
    data: TinkerData = TinkerData()
    sampling: TinkerSampling = TinkerSampling()
    val_sampling: RllmValidationSampling = RllmValidationSampling()
    algorithm: RllmAlgorithm = RllmAlgorithm()
    trainer: RllmTrainer = RllmTrainer()
    hydra: HydraSettings = HydraSettings()
    defaults: tuple[Any, ...] = ()
