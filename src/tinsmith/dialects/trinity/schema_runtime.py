"""Trinity's keys under `model` and `cluster`, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any

from tinsmith.dialects.base import Copied, Honoured, NoMeaning, Refused, Section

SERVER = "the server decides how it holds its models."
LORA = "lora_configs: the first entry makes the adapter, unless model.tinker.enable is true"


class Tinker(Section):
    """`model.tinker`."""

    enable: Annotated[bool, Honoured("which of model.tinker and model.lora_configs makes the adapter")] = False
    rank: Annotated[int, Honoured("model.rank")] = 32
    seed: Annotated[int | None, Honoured("model.seed")] = None
    train_mlp: Annotated[bool, Honoured("model.train_mlp")] = True
    train_attn: Annotated[bool, Honoured("model.train_attn")] = True
    train_unembed: Annotated[bool, Honoured("model.train_unembed")] = True
    base_url: Annotated[str | None, Honoured("model.base_url")] = None
    base_model: Annotated[str | None, Honoured("model.name; null is model.model_path")] = None
    server_loss_fn: Annotated[str | None, NoMeaning("losses that the server has are computed there anyway.")] = None


class Lora(Section):
    """An entry of `model.lora_configs`."""

    name: Annotated[str | None, NoMeaning("an adapter is known by the path of its checkpoint.")] = None
    path: Annotated[
        str | None, Honoured("model.load_from, for a tinker:// path; other paths are refused")
    ] = None  # fmt: skip
    base_model_name: Annotated[str | None, NoMeaning("the base model is model.model_path.")] = None
    lora_rank: Annotated[int, Honoured("model.rank")] = 32
    lora_alpha: Annotated[int, Honoured("32, the constant of the Tinker API; others are refused")] = 32
    lora_dtype: Annotated[str, NoMeaning("adapters are trained in float32.")] = "auto"
    target_modules: Annotated[str, Honoured("model.train_attn and model.train_mlp, as for all-linear")] = "all-linear"
    exclude_modules: Annotated[
        str | None,
        Refused("single modules cannot be left out.", "Use model.tinker with train_attn, train_mlp, train_unembed."),
    ] = None
    is_dummy: Annotated[bool, NoMeaning("it is Trinity's own mark.")] = False


class External(Section):
    """`model.external_model`: a model of another service, in place of one in training."""

    enable: Annotated[
        bool,
        Refused(
            "a model that is reached over OpenAI's API alone cannot be trained or benched here.",
            "Serve it with tinsmith serve.",
        ),
    ] = False
    base_url_env: Annotated[str, NoMeaning("there is no external model here.")] = "OPENAI_BASE_URL"
    api_key_env: Annotated[str, NoMeaning("there is no external model here.")] = "OPENAI_API_KEY"
    model_name: Annotated[str | None, NoMeaning("there is no external model here.")] = None


class Model(Section):
    """`model`."""

    model_path: Annotated[str, Honoured("model.name")] = ""
    trust_remote_code: Annotated[
        bool, Refused("no code that comes with a model is run.", "Serve a model that transformers knows.")
    ] = False
    critic_model_path: Annotated[str, Honoured("a second adapter on the model itself; other models are refused")] = ""
    custom_chat_template: Annotated[str | None, Honoured("model.chat_template")] = None
    chat_template_path: Annotated[str | None, Honoured("model.chat_template, from the file")] = None
    temperature: Annotated[float, Copied("sampling.temperature")] = 1.0
    top_p: Annotated[float, Copied("sampling.top_p")] = 1.0
    top_k: Annotated[int, Copied("sampling.top_k")] = -1
    logprobs: Annotated[int, NoMeaning("the sampled token's logprob is what is trained on.")] = 0
    max_model_len: Annotated[int | None, Honoured("checked; the bound of sampling.max_tokens where that is unset")] = (
        None
    )
    max_prompt_tokens: Annotated[int | None, Honoured("sampling.max_prompt_tokens")] = None
    max_response_tokens: Annotated[int | None, Honoured("sampling.max_tokens")] = None
    min_response_tokens: Annotated[
        int, Refused("the Tinker API has no least length.", "Leave it out, or reward length.")
    ] = 0
    enable_prompt_truncation: Annotated[
        bool, NoMeaning("a prompt above max_prompt_tokens makes a failed rollout, which is left out.")
    ] = True
    repetition_penalty: Annotated[float, Refused("the Tinker API has none.", "Leave it out.")] = 1.0
    enable_thinking: Annotated[bool | None, Honoured("model.chat_template_values.enable_thinking")] = None
    lora_configs: Annotated[tuple[Lora, ...] | None, Honoured(LORA)] = None
    fully_sharded_loras: Annotated[bool, NoMeaning(SERVER)] = False
    max_cpu_loras: Annotated[int | None, NoMeaning(SERVER)] = None
    rope_scaling: Annotated[
        dict[str, Any] | None, Refused("a served model keeps its own.", "Change the model's config.json and serve it.")
    ] = None
    rope_theta: Annotated[
        float | None, Refused("a served model keeps its own.", "Change the model's config.json and serve it.")
    ] = None
    tinker: Tinker = Tinker()
    external_model: External = External()


GPUS = "how many GPUs there are is up to the server; CPU threads of a run's own service are service.threads."


class Cluster(Section):
    """`cluster`."""

    ray_address: Annotated[str, NoMeaning("there is no Ray here.")] = "auto"
    node_num: Annotated[int, NoMeaning(GPUS)] = 0
    gpu_per_node: Annotated[int, NoMeaning(GPUS)] = 0
    total_gpu_num: Annotated[int, NoMeaning(GPUS)] = 0
    rollout_gpu_num: Annotated[int, NoMeaning(GPUS)] = 0
    auxiliary_model_gpu_num: Annotated[int, NoMeaning(GPUS)] = 0
    explorer_gpu_num: Annotated[int, NoMeaning(GPUS)] = 0
    trainer_gpu_num: Annotated[int, NoMeaning(GPUS)] = 0
    trainer_node_num: Annotated[int, NoMeaning(GPUS)] = 0
    trainer_gpu_num_per_node: Annotated[int, NoMeaning(GPUS)] = 0
