"""The keys of a Trinity-RFT file under `model`, `cluster`, `trainer`, `synchronizer`, `monitor` and `explorer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tinsmith.dialects.base import Copied, Ignored, Refused, Section
from tinsmith.integrations.trinity.files.schema_buffer import SET_BY_TRINITY

SERVER_DECIDES = "the server decides how it runs its models."
SERVER_GPUS = "the server decides how many GPUs it uses; service.threads sets the CPU threads of a run's own service."
SERVER_BATCHES = "the server packs micro-batches itself."
SERVER_SHARDS = "the server decides how it shards and trains its models."
NO_RUNNERS = "rollouts are tasks of one event loop; there are no runner processes."
ONE_TEMPLATE = "a run has one chat template."
SERVE_COMMAND = "tinsmith serve is a separate command."
Arguments = dict[str, Any]


def _normalised(value: Any) -> Any:
    """Trinity's sync methods and styles are case-insensitive, and some have older names."""
    aliases = {
        "online": "nccl",
        "offline": "checkpoint",
        "dynamic_by_explorer": "explorer_driven",
        "dynamic_by_trainer": "trainer_driven",
    }
    return aliases.get(value.lower(), value.lower()) if isinstance(value, str) else value


class TinkerSection(Section):
    """`model.tinker`."""

    enable: bool = False
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None
    base_model: str | None = None
    forward_backward_chunk_bytes: Annotated[int | None, Ignored("the client splits large requests itself.")] = None
    server_loss_fn: Annotated[str | None, Ignored("a loss that the server offers always runs there.")] = None


class LoraConfig(Section):
    """An entry of `model.lora_configs`."""

    name: Annotated[str | None, Ignored("an adapter is identified by the path of its checkpoint.")] = None
    path: str | None = None
    base_model_name: Annotated[str | None, Ignored("the base model is model.model_path.")] = None
    lora_rank: int = 32
    lora_alpha: int = 32
    lora_dtype: Annotated[str, Ignored("adapters are trained in float32.")] = "auto"
    target_modules: str = "all-linear"
    exclude_modules: Annotated[
        str | None,
        Refused("single modules cannot be excluded.", "Use model.tinker with train_attn, train_mlp, train_unembed."),
    ] = None
    is_dummy: Annotated[bool, Ignored("Trinity uses it internally.")] = False


class ExternalModel(Section):
    """`model.external_model`: a model at another service, in place of the trained one."""

    enable: Annotated[
        bool,
        Refused(
            "a model that is reachable only through the OpenAI API can be neither trained nor benchmarked.",
            "Serve it with tinsmith serve.",
        ),
    ] = False
    base_url_env: Annotated[str, Ignored("there is no external model.")] = "OPENAI_BASE_URL"
    api_key_env: Annotated[str, Ignored("there is no external model.")] = "OPENAI_API_KEY"
    model_name: Annotated[str | None, Ignored("there is no external model.")] = None


class ModelSection(Section):
    """`model`."""

    model_path: str = ""
    trust_remote_code: Annotated[
        bool, Refused("code from model repositories is never executed.", "Use a model that transformers supports.")
    ] = False
    critic_model_path: str = ""
    custom_chat_template: str | None = None
    chat_template_path: str | None = None
    temperature: Annotated[float, Copied("sampling.temperature")] = 1.0
    top_p: Annotated[float, Copied("sampling.top_p")] = 1.0
    top_k: Annotated[int, Copied("sampling.top_k")] = -1
    logprobs: Annotated[int, Ignored("the logprob of the sampled token is always recorded.")] = 0
    max_model_len: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    min_response_tokens: Annotated[
        int, Refused("the Tinker API has no minimum length.", "Leave it out, or reward length.")
    ] = 0
    enable_prompt_truncation: Annotated[
        bool, Ignored("a prompt longer than max_prompt_tokens makes the rollout fail, and failed rollouts are dropped.")
    ] = True
    repetition_penalty: Annotated[float, Refused("the Tinker API does not offer it.", "Leave it out.")] = 1.0
    enable_thinking: bool | None = None
    lora_configs: tuple[LoraConfig, ...] | None = None
    fully_sharded_loras: Annotated[bool, Ignored(SERVER_DECIDES)] = False
    max_cpu_loras: Annotated[int | None, Ignored(SERVER_DECIDES)] = None
    rope_scaling: Annotated[
        dict[str, Any] | None, Refused("a served model uses its own.", "Change the model's config.json and serve it.")
    ] = None
    rope_theta: Annotated[
        float | None, Refused("a served model uses its own.", "Change the model's config.json and serve it.")
    ] = None
    tinker: TinkerSection = TinkerSection()
    external_model: ExternalModel = ExternalModel()


class Cluster(Section):
    """`cluster`."""

    ray_address: Annotated[str, Ignored("there is no Ray here.")] = "auto"
    node_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    gpu_per_node: Annotated[int, Ignored(SERVER_GPUS)] = 0
    total_gpu_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    rollout_gpu_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    auxiliary_model_gpu_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    explorer_gpu_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    trainer_gpu_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    trainer_node_num: Annotated[int, Ignored(SERVER_GPUS)] = 0
    trainer_gpu_num_per_node: Annotated[int, Ignored(SERVER_GPUS)] = 0


class Trainer(Section):
    """`trainer`."""

    name: Annotated[str, Ignored("there are no named processes.")] = "trainer"
    trainer_type: Annotated[Literal["verl", "tinker"], Ignored("training always goes through the Tinker API.")] = "verl"
    trainer_strategy: Annotated[str, Ignored(SERVER_SHARDS)] = "fsdp"
    save_interval: Annotated[int, Copied("checkpoint.every")] = 0
    enable_preview: Annotated[bool, Ignored("the run folder holds every rollout.")] = False
    total_steps: int | None = None
    save_hf_checkpoint: Annotated[str, Ignored("checkpoints are adapters on the server, in PEFT's format.")] = "last"
    grad_clip: Annotated[float, Copied("optimizer.grad_clip_norm")] = 1.0
    use_dynamic_bsz: Annotated[bool, Ignored(SERVER_BATCHES)] = True
    use_remove_padding: Annotated[bool, Ignored(SERVER_BATCHES)] = True
    balance_batch: Annotated[bool, Ignored(SERVER_BATCHES)] = True
    max_token_len_per_gpu: Annotated[int | None, Ignored(SERVER_BATCHES)] = None
    critic_warmup: int = 0
    ulysses_sequence_parallel_size: Annotated[int, Ignored(SERVER_SHARDS)] = 1
    fix_actor_microbatch_loss_scale: Annotated[
        bool, Ignored("the loss is normalised over the whole batch, however the server splits it.")
    ] = False
    param_offload: Annotated[bool, Ignored(SERVER_SHARDS)] = False
    optimizer_offload: Annotated[bool, Ignored(SERVER_SHARDS)] = False
    grad_offload: Annotated[bool, Ignored(SERVER_SHARDS)] = False
    offload_policy: Annotated[bool, Ignored(SERVER_SHARDS)] = False
    save_strategy: Annotated[str, Ignored("one process saves checkpoints.")] = "unrestricted"
    max_checkpoints_to_keep: Annotated[int, Copied("checkpoint.keep")] = 0
    megatron: Annotated[Arguments, Ignored(SERVER_SHARDS)] = Field(default_factory=dict)
    trust_remote_code: Annotated[bool, Ignored(SET_BY_TRINITY)] = False
    trainer_config: Arguments = Field(default_factory=dict)
    trainer_config_path: Annotated[str, Ignored(SERVER_SHARDS)] = ""


class Synchronizer(Section):
    """`synchronizer`."""

    sync_method: Annotated[Literal["nccl", "checkpoint", "memory"], BeforeValidator(_normalised)] = "nccl"
    sync_style: Annotated[
        Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"], BeforeValidator(_normalised)
    ] = "fixed"
    sync_interval: int = 1
    explorer_sync_interval: int | None = None
    trainer_sync_interval: int | None = None
    sync_offset: int = 0
    sync_timeout: int = 3600
    group_name: Annotated[str, Ignored("there is no GPU process group.")] = "rollout_weight_sync"
    wait_for_checkpoint: Annotated[bool, Ignored("Trinity does not read it either.")] = False
    explorer_world_size: Annotated[int | None, Ignored(SET_BY_TRINITY)] = None
    ray_namespace: Annotated[str, Ignored(SET_BY_TRINITY)] = ""


class Monitor(Section):
    """`monitor`."""

    monitor_type: str = "tensorboard"
    monitor_args: Arguments | None = None
    detailed_stats: Annotated[bool, Ignored("the run folder holds every rollout of an evaluation.")] = False
    enable_ray_timeline: Annotated[bool, Ignored("there is no Ray here.")] = False
    cache_dir: Annotated[str, Ignored(SET_BY_TRINITY)] = ""


class InferenceModel(Section):
    """Keys of `rollout_model` and `auxiliary_models`."""

    trust_remote_code: Annotated[
        bool, Refused("code from model repositories is never executed.", "Use a model that transformers supports.")
    ] = False
    engine_type: Annotated[str, Ignored("every model is reached through the Tinker API.")] = "vllm"
    tensor_parallel_size: Annotated[int, Ignored(SERVER_DECIDES)] = 1
    data_parallel_size: Annotated[int, Ignored(SERVER_DECIDES)] = 1
    pipeline_parallel_size: Annotated[int, Ignored(SERVER_DECIDES)] = 1
    enable_expert_parallel: Annotated[bool, Ignored(SERVER_DECIDES)] = False
    gpu_per_engine: Annotated[int, Ignored(SERVER_DECIDES)] = 0
    extra_engine_args: Annotated[Arguments, Ignored(SERVER_DECIDES)] = Field(default_factory=dict)
    use_v1: Annotated[bool, Ignored(SERVER_DECIDES)] = True
    enforce_eager: Annotated[bool, Ignored(SERVER_DECIDES)] = False
    enable_prefix_caching: Annotated[bool, Ignored(SERVER_DECIDES)] = True
    enable_chunked_prefill: Annotated[bool, Ignored(SERVER_DECIDES)] = True
    gpu_memory_utilization: Annotated[float, Ignored(SERVER_DECIDES)] = 0.9
    weight_sync_buffer_size: Annotated[int, Ignored(SERVER_DECIDES)] = 1024
    enable_log_requests: Annotated[bool, Ignored(SERVER_DECIDES)] = False
    nnodes: Annotated[int, Ignored(SET_BY_TRINITY)] = 1
    node_rank: Annotated[int, Ignored(SET_BY_TRINITY)] = 0
    bundle_indices: Annotated[str, Ignored(SET_BY_TRINITY)] = ""
    engine_id: Annotated[int, Ignored(SET_BY_TRINITY)] = 0
    ray_namespace: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    ray_actor_name: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    sync_method: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    checkpoint_job_dir: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    cuda_visible_devices: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    enable_lora: Annotated[bool, Ignored(SET_BY_TRINITY)] = False
    enable_runtime_lora_updating: Annotated[bool, Ignored(SET_BY_TRINITY)] = False
    lora_modules: Annotated[tuple[Arguments, ...] | None, Ignored(SET_BY_TRINITY)] = None
    lora_kwargs: Annotated[Arguments, Ignored(SET_BY_TRINITY)] = Field(default_factory=dict)
    rope_scaling: Annotated[Arguments | None, Ignored(SET_BY_TRINITY)] = None
    rope_theta: Annotated[float | None, Ignored(SET_BY_TRINITY)] = None
    temperature: Annotated[float | None, Ignored(SET_BY_TRINITY)] = None
    top_p: Annotated[float | None, Ignored(SET_BY_TRINITY)] = None
    top_k: Annotated[int | None, Ignored(SET_BY_TRINITY)] = None
    logprobs: Annotated[int | None, Ignored(SET_BY_TRINITY)] = None
    min_response_tokens: Annotated[
        int | None, Refused("the Tinker API has no minimum length.", "Leave it out, or reward length.")
    ] = None
    enable_prompt_truncation: Annotated[
        bool | None, Ignored("a prompt longer than max_prompt_tokens makes the rollout fail.")
    ] = None
    repetition_penalty: Annotated[float | None, Refused("the Tinker API does not offer it.", "Leave it out.")] = None
    enable_multimodal: Annotated[bool, Ignored("a model that takes images takes them in every run.")] = False
    enable_history: Annotated[bool, Ignored("the run folder records every turn.")] = False
    enable_openai_api: Annotated[bool, Ignored("workflows that use the OpenAI API always get an endpoint.")] = False
    base_port: Annotated[int | None, Ignored("workflows that use the OpenAI API get its address.")] = None
    api_key: Annotated[str, Ignored("workflows that use the OpenAI API get its key.")] = "EMPTY"
    enable_auto_tool_choice: Annotated[bool, Ignored("tools are offered wherever a workflow passes them.")] = False
    tool_call_parser: Annotated[str | None, Ignored("the server picks the tool-call parser by model family.")] = None
    reasoning_parser: Annotated[str | None, Ignored("replies are stored whole, including the reasoning.")] = None
    enable_return_routed_experts: Annotated[
        bool, Ignored("the sampler records its experts where algorithm.enable_router_replay is true.")
    ] = False


class RolloutModel(InferenceModel):
    """`explorer.rollout_model`."""

    external_model_config: ExternalModel = ExternalModel()
    model_path: Annotated[str | None, Ignored(SET_BY_TRINITY)] = None
    name: Annotated[str | None, Ignored("the trained model has one name, model.model_path.")] = None
    engine_num: int = 1
    ignore_eos: bool = False
    dtype: str = "bfloat16"
    seed: int = 42
    max_model_len: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    chat_template: str | None = None
    enable_thinking: bool | None = None


class ExternalJudge(ExternalModel):
    """`external_model_config` of an auxiliary model: a judge at another service that offers the OpenAI API."""


class AuxiliaryModel(InferenceModel):
    """An entry of `explorer.auxiliary_models`."""

    external_model_config: ExternalJudge = ExternalJudge()
    model_path: str | None = None
    name: Annotated[str | None, Ignored("a model is identified by its path.")] = None
    ignore_eos: Annotated[bool, Ignored("a judge's reply always ends at its end-of-sequence token.")] = False
    engine_num: Annotated[int, Ignored(SERVER_DECIDES)] = 1
    dtype: Annotated[str, Ignored(SERVER_DECIDES)] = "bfloat16"
    seed: Annotated[int, Ignored("each request derives its seed from the run's.")] = 42
    max_model_len: Annotated[int | None, Ignored(SERVER_DECIDES)] = None
    max_prompt_tokens: Annotated[int | None, Ignored(SERVER_DECIDES)] = None
    max_response_tokens: int | None = None
    chat_template: Annotated[str | None, Refused(ONE_TEMPLATE, "Serve the model with a template of its own.")] = None
    enable_thinking: bool | None = None


class OverRollout(Section):
    """`explorer.over_rollout`."""

    ratio: Annotated[float, Copied("rollout.over.ratio")] = 0.0
    wait_after_min: float = 30.0
    return_partial_tasks: bool = False


class DynamicTimeout(Section):
    """`explorer.dynamic_timeout`."""

    enable: bool = False
    warmup_min_steps: int = 1
    ratio: float = 3.0


class Explorer(Section):
    """`explorer`."""

    name: str = "explorer"
    mode: Annotated[str, Ignored(SET_BY_TRINITY)] = "both"
    runner_per_model: int = 8
    runner_prepare_concurrency: Annotated[int, Ignored(NO_RUNNERS)] = 8
    runner_prepare_max_retries: Annotated[int, Ignored(NO_RUNNERS)] = 2
    runner_num: Annotated[int | None, Ignored(NO_RUNNERS)] = None
    runner_state_report_interval: Annotated[int, Ignored(NO_RUNNERS)] = 0
    max_timeout: Annotated[int, Copied("rollout.timeout")] = 1800
    max_retry_times: Annotated[int, Copied("rollout.retries")] = 2
    env_vars: Annotated[
        Arguments, Refused("a run sets no environment variables.", "Set them in the shell that starts the run.")
    ] = Field(default_factory=dict)
    concurrent_mode: Annotated[
        Literal["sequential", "asynchronous", "multi-threading"], Ignored("replies to a task are sampled concurrently.")
    ] = "sequential"
    max_repeat_times_per_runner: Annotated[int | None, Copied("rollout.split")] = None
    rollout_model: RolloutModel = RolloutModel()
    auxiliary_models: tuple[AuxiliaryModel, ...] = ()
    eval_interval: int = 100
    eval_on_startup: bool = True
    bench_on_latest_checkpoint: bool = False
    proxy_port: Annotated[int, Ignored(SERVE_COMMAND)] = 8010
    listen_address: Annotated[str, Ignored(SERVE_COMMAND)] = "localhost"
    service_status_check_interval: Annotated[int, Ignored(SERVE_COMMAND)] = 60
    min_running_model_num: Annotated[int, Ignored(SERVE_COMMAND)] = 1
    db_url: Annotated[str | None, Ignored(SERVE_COMMAND)] = None
    over_rollout: OverRollout = OverRollout()
    dynamic_timeout: DynamicTimeout = DynamicTimeout()
    max_inflight_batches: int = 2
