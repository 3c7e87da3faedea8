"""Trinity's keys under `explorer`, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.dialects.base import Copied, Honoured, NoMeaning, Refused, Section
from tinsmith.dialects.trinity.schema_buffer import AUTO
from tinsmith.dialects.trinity.schema_runtime import SERVER, External

RUNNERS = "rollouts are tasks of one event loop; there are no processes to prepare or to watch."
TEMPLATE = "a run has one chat template."
PROXY = "serving is a command of its own: tinsmith serve."
Arguments = dict[str, Any]


class Engine(Section):
    """What `rollout_model` and `auxiliary_models` share."""

    trust_remote_code: Annotated[
        bool, Refused("no code that comes with a model is run.", "Serve a model that transformers knows.")
    ] = False
    engine_type: Annotated[str, NoMeaning("every model is reached over the Tinker API.")] = "vllm"
    tensor_parallel_size: Annotated[int, NoMeaning(SERVER)] = 1
    data_parallel_size: Annotated[int, NoMeaning(SERVER)] = 1
    pipeline_parallel_size: Annotated[int, NoMeaning(SERVER)] = 1
    enable_expert_parallel: Annotated[bool, NoMeaning(SERVER)] = False
    gpu_per_engine: Annotated[int, NoMeaning(SERVER)] = 0
    extra_engine_args: Annotated[Arguments, NoMeaning(SERVER)] = Field(default_factory=dict)
    use_v1: Annotated[bool, NoMeaning(SERVER)] = True
    enforce_eager: Annotated[bool, NoMeaning(SERVER)] = False
    enable_prefix_caching: Annotated[bool, NoMeaning(SERVER)] = True
    enable_chunked_prefill: Annotated[bool, NoMeaning(SERVER)] = True
    gpu_memory_utilization: Annotated[float, NoMeaning(SERVER)] = 0.9
    weight_sync_buffer_size: Annotated[int, NoMeaning(SERVER)] = 1024
    enable_log_requests: Annotated[bool, NoMeaning(SERVER)] = False
    nnodes: Annotated[int, NoMeaning(AUTO)] = 1
    node_rank: Annotated[int, NoMeaning(AUTO)] = 0
    bundle_indices: Annotated[str, NoMeaning(AUTO)] = ""
    engine_id: Annotated[int, NoMeaning(AUTO)] = 0
    ray_namespace: Annotated[str | None, NoMeaning(AUTO)] = None
    ray_actor_name: Annotated[str | None, NoMeaning(AUTO)] = None
    sync_method: Annotated[str | None, NoMeaning(AUTO)] = None
    checkpoint_job_dir: Annotated[str | None, NoMeaning(AUTO)] = None
    cuda_visible_devices: Annotated[str | None, NoMeaning(AUTO)] = None
    enable_lora: Annotated[bool, NoMeaning(AUTO)] = False
    enable_runtime_lora_updating: Annotated[bool, NoMeaning(AUTO)] = False
    lora_modules: Annotated[tuple[Arguments, ...] | None, NoMeaning(AUTO)] = None
    lora_kwargs: Annotated[Arguments, NoMeaning(AUTO)] = Field(default_factory=dict)
    rope_scaling: Annotated[Arguments | None, NoMeaning(AUTO)] = None
    rope_theta: Annotated[float | None, NoMeaning(AUTO)] = None
    temperature: Annotated[float | None, NoMeaning(AUTO)] = None
    top_p: Annotated[float | None, NoMeaning(AUTO)] = None
    top_k: Annotated[int | None, NoMeaning(AUTO)] = None
    logprobs: Annotated[int | None, NoMeaning(AUTO)] = None
    min_response_tokens: Annotated[
        int | None, Refused("the Tinker API has no least length.", "Leave it out, or reward length.")
    ] = None
    enable_prompt_truncation: Annotated[
        bool | None, NoMeaning("a prompt above max_prompt_tokens makes a failed rollout.")
    ] = None
    repetition_penalty: Annotated[float | None, Refused("the Tinker API has none.", "Leave it out.")] = None
    enable_multimodal: Annotated[bool, Refused("models with images are not served.", "Leave it out.")] = False
    enable_history: Annotated[bool, NoMeaning("every turn of every model is kept.")] = False
    enable_openai_api: Annotated[bool, NoMeaning("workflows that want OpenAI's API have it.")] = False
    base_port: Annotated[int | None, NoMeaning("workflows that want OpenAI's API are told its address.")] = None
    api_key: Annotated[str, NoMeaning("workflows that want OpenAI's API are told its key.")] = "EMPTY"
    enable_auto_tool_choice: Annotated[bool, NoMeaning("tools are offered wherever a workflow gives them.")] = False
    tool_call_parser: Annotated[str | None, NoMeaning("the server reads tool calls by the model's family.")] = None
    reasoning_parser: Annotated[str | None, NoMeaning("replies are kept whole, thoughts among them.")] = None
    enable_return_routed_experts: Annotated[
        bool, Refused("routers of experts are not told by the Tinker API.", "Leave it out.")
    ] = False


class RolloutModel(Engine):
    """`explorer.rollout_model`."""

    external_model_config: External = External()
    model_path: Annotated[str | None, NoMeaning(AUTO)] = None
    name: Annotated[str | None, NoMeaning("the model in training has one name, model.model_path.")] = None
    engine_num: Annotated[int, Honoured("concurrency: runner_per_model times this")] = 1
    ignore_eos: Annotated[bool, Honoured("sampling.stop: nothing but max_tokens ends a reply")] = False
    dtype: Annotated[str, Honoured("service.dtype; bfloat16 is auto, so where the hardware is fast at it")] = "bfloat16"
    seed: Annotated[int, Honoured("seed; each request draws one of its own from it")] = 42
    max_model_len: Annotated[int | None, Honoured("in place of model's")] = None
    max_prompt_tokens: Annotated[int | None, Honoured("in place of model's")] = None
    max_response_tokens: Annotated[int | None, Honoured("in place of model's")] = None
    chat_template: Annotated[str | None, Honoured("model.chat_template, in place of model's")] = None
    enable_thinking: Annotated[
        bool | None, Honoured("model.chat_template_values.enable_thinking, in place of model's")
    ] = None


class ExternalJudge(External):
    """`external_model_config` of an auxiliary model: a judge at another service, in OpenAI's dialect."""

    enable: Annotated[bool, Honoured("base_url and key_env of a judge")] = False
    base_url_env: Annotated[str, Honoured("base_url of a judge: what this variable holds")] = "OPENAI_BASE_URL"
    api_key_env: Annotated[str, Honoured("key_env of a judge")] = "OPENAI_API_KEY"
    model_name: Annotated[str | None, Honoured("model of a judge; unset, model_path")] = None


class AuxiliaryModel(Engine):
    """An entry of `explorer.auxiliary_models`."""

    external_model_config: ExternalJudge = ExternalJudge()
    model_path: Annotated[
        str | None, Honoured("of the first one: algorithm.teacher, and the model of a judge")
    ] = None  # fmt: skip
    name: Annotated[str | None, NoMeaning("a model is known by its path.")] = None
    ignore_eos: Annotated[bool, NoMeaning("a judge's word ends where it ends.")] = False
    engine_num: Annotated[int, NoMeaning(SERVER)] = 1
    dtype: Annotated[str, NoMeaning(SERVER)] = "bfloat16"
    seed: Annotated[int, NoMeaning("each request draws a seed of its own from the run's.")] = 42
    max_model_len: Annotated[int | None, NoMeaning(SERVER)] = None
    max_prompt_tokens: Annotated[int | None, NoMeaning(SERVER)] = None
    max_response_tokens: Annotated[int | None, Honoured("max_tokens of a judge")] = None
    chat_template: Annotated[str | None, Refused(TEMPLATE, "Serve the model with its own template.")] = None
    enable_thinking: Annotated[bool | None, Honoured("chat_template_values.enable_thinking of a judge")] = None


class OverRollout(Section):
    """`explorer.over_rollout`."""

    ratio: Annotated[float, Copied("rollout.over.ratio")] = 0.0
    wait_after_min: Annotated[float, Honoured("rollout.over.wait, with a ratio")] = 30.0
    return_partial_tasks: Annotated[bool, Honoured("rollout.over.partial, with a ratio; rollout.partial: keep")] = False


class DynamicTimeout(Section):
    """`explorer.dynamic_timeout`."""

    enable: Annotated[bool, Honoured("rollout.timeout_ratio, which is 0 without")] = False
    warmup_min_steps: Annotated[int, Honoured("rollout.timeout_warmup, with enable: true")] = 1
    ratio: Annotated[float, Honoured("rollout.timeout_ratio")] = 3.0


class Explorer(Section):
    """`explorer`."""

    name: Annotated[str, NoMeaning("there are no named processes.")] = "explorer"
    mode: Annotated[str, NoMeaning(AUTO)] = "both"
    runner_per_model: Annotated[int, Honoured("concurrency: this times rollout_model.engine_num")] = 8
    runner_prepare_concurrency: Annotated[int, NoMeaning(RUNNERS)] = 8
    runner_prepare_max_retries: Annotated[int, NoMeaning(RUNNERS)] = 2
    runner_num: Annotated[int | None, NoMeaning(RUNNERS)] = None
    runner_state_report_interval: Annotated[int, NoMeaning(RUNNERS)] = 0
    max_timeout: Annotated[int, Copied("rollout.timeout")] = 1800
    max_retry_times: Annotated[int, Copied("rollout.retries")] = 2
    env_vars: Annotated[
        Arguments, Refused("a run changes no environment variable.", "Set them where you start it.")
    ] = Field(default_factory=dict)
    concurrent_mode: Annotated[
        Literal["sequential", "asynchronous", "multi-threading"],
        NoMeaning("replies to a task are sampled side by side."),
    ] = "sequential"
    max_repeat_times_per_runner: Annotated[int | None, Copied("rollout.split")] = None
    rollout_model: RolloutModel = RolloutModel()
    auxiliary_models: tuple[AuxiliaryModel, ...] = ()
    eval_interval: Annotated[int, Honoured("eval.every")] = 100
    eval_on_startup: Annotated[bool, Honoured("eval.before; bench.base in mode bench")] = True
    bench_on_latest_checkpoint: Annotated[bool, Honoured("bench.of_run: last; else all, in mode bench")] = False
    proxy_port: Annotated[int, NoMeaning(PROXY)] = 8010
    listen_address: Annotated[str, NoMeaning(PROXY)] = "localhost"
    service_status_check_interval: Annotated[int, NoMeaning(PROXY)] = 60
    min_running_model_num: Annotated[int, NoMeaning(PROXY)] = 1
    db_url: Annotated[str | None, NoMeaning(PROXY)] = None
    over_rollout: OverRollout = OverRollout()
    dynamic_timeout: DynamicTimeout = DynamicTimeout()
    max_inflight_batches: Annotated[int, Honoured("sync.in_flight, in sync_style fully_async")] = 2
