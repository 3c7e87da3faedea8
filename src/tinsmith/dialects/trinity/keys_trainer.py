"""Trinity's keys under `trainer`, `synchronizer` and `monitor`, and what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tinsmith.dialects.base import Copied, Honoured, NoMeaning, Section
from tinsmith.dialects.trinity.schema_buffer import AUTO

BATCHES = "the server packs passes by itself."
SHARDS = "the server decides how it holds and trains its models."
Arguments = dict[str, Any]


def _plain(word: Any) -> Any:
    """Trinity reads these words in any case, and has older ones for some."""
    aliases = {
        "online": "nccl",
        "offline": "checkpoint",
        "dynamic_by_explorer": "explorer_driven",
        "dynamic_by_trainer": "trainer_driven",
    }
    return aliases.get(word.lower(), word.lower()) if isinstance(word, str) else word


class Trainer(Section):
    """`trainer`."""

    name: Annotated[str, NoMeaning("there are no named processes.")] = "trainer"
    trainer_type: Annotated[
        Literal["verl", "tinker"], NoMeaning("training goes through the Tinker API, by whatever server there is.")
    ] = "verl"
    trainer_strategy: Annotated[str, NoMeaning(SHARDS)] = "fsdp"
    save_interval: Annotated[int, Copied("checkpoint.every")] = 0
    enable_preview: Annotated[bool, NoMeaning("every rollout is in the run folder.")] = False
    total_steps: Annotated[int | None, Honoured("steps, where it is below what the data gives")] = None
    save_hf_checkpoint: Annotated[str, NoMeaning("checkpoints are adapters on the server, in PEFT's layout.")] = "last"
    grad_clip: Annotated[float, Copied("optimizer.grad_clip_norm")] = 1.0
    use_dynamic_bsz: Annotated[bool, NoMeaning(BATCHES)] = True
    use_remove_padding: Annotated[bool, NoMeaning(BATCHES)] = True
    balance_batch: Annotated[bool, NoMeaning(BATCHES)] = True
    max_token_len_per_gpu: Annotated[int | None, NoMeaning(BATCHES)] = None
    critic_warmup: Annotated[int, Honoured("algorithm.critic.warmup_steps")] = 0
    ulysses_sequence_parallel_size: Annotated[int, NoMeaning(SHARDS)] = 1
    fix_actor_microbatch_loss_scale: Annotated[
        bool, NoMeaning("a loss is one over the whole batch, however it is cut.")
    ] = False
    param_offload: Annotated[bool, NoMeaning(SHARDS)] = False
    optimizer_offload: Annotated[bool, NoMeaning(SHARDS)] = False
    grad_offload: Annotated[bool, NoMeaning(SHARDS)] = False
    offload_policy: Annotated[bool, NoMeaning(SHARDS)] = False
    save_strategy: Annotated[str, NoMeaning("one process saves.")] = "unrestricted"
    max_checkpoints_to_keep: Annotated[int, Copied("checkpoint.keep")] = 0
    megatron: Annotated[Arguments, NoMeaning(SHARDS)] = Field(default_factory=dict)
    trust_remote_code: Annotated[bool, NoMeaning(AUTO)] = False
    trainer_config: Annotated[Arguments, NoMeaning(SHARDS)] = Field(default_factory=dict)
    trainer_config_path: Annotated[str, NoMeaning(SHARDS)] = ""


class Synchronizer(Section):
    """`synchronizer`."""

    sync_method: Annotated[
        Literal["nccl", "checkpoint", "memory"],
        BeforeValidator(_plain),
        Honoured("sync.method for checkpoint; nccl and memory leave it to us"),
    ] = "nccl"
    sync_style: Annotated[
        Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"],
        BeforeValidator(_plain),
        Honoured("sync.style: fixed, on_demand (explorer_driven), on_publish (trainer_driven), live (fully_async)"),
    ] = "fixed"
    sync_interval: Annotated[int, Honoured("sync.interval, sync.publish_every")] = 1
    explorer_sync_interval: Annotated[int | None, Honoured("sync.interval")] = None
    trainer_sync_interval: Annotated[int | None, Honoured("sync.publish_every")] = None
    sync_offset: Annotated[int, Honoured("staleness; in sync_style fully_async, nothing")] = 0
    sync_timeout: Annotated[int, Copied("sync.timeout")] = 3600
    group_name: Annotated[str, NoMeaning("there is no group of GPUs to name.")] = "rollout_weight_sync"
    wait_for_checkpoint: Annotated[bool, NoMeaning("Trinity does not read it either.")] = False
    explorer_world_size: Annotated[int | None, NoMeaning(AUTO)] = None
    ray_namespace: Annotated[str, NoMeaning(AUTO)] = ""


class Monitor(Section):
    """`monitor`."""

    monitor_type: Annotated[
        str, Honoured("monitors, beside console and report; unset, these two alone. swanlab is refused")
    ] = "tensorboard"
    monitor_args: Annotated[Arguments | None, Honoured("monitors; keys and passwords come from the environment")] = None
    detailed_stats: Annotated[bool, NoMeaning("every rollout of an evaluation is in the run folder.")] = False
    enable_ray_timeline: Annotated[bool, NoMeaning("there is no Ray here.")] = False
    cache_dir: Annotated[str, NoMeaning(AUTO)] = ""
