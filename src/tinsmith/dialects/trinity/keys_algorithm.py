"""Trinity's keys under `algorithm`, and what becomes of each. The arguments of its parts are in `names.py`."""

from __future__ import annotations

from typing import Annotated, Any

from tinsmith.dialects.base import Copied, Honoured, NoMeaning, Refused, Section

Arguments = dict[str, Any]


class Optimizer(Section):
    """`algorithm.optimizer`."""

    lr: Annotated[float, Copied("optimizer.learning_rate")] = 1e-6
    lr_warmup_steps: Annotated[int, Honoured("optimizer.warmup_steps; -1 is lr_warmup_steps_ratio")] = -1
    lr_warmup_steps_ratio: Annotated[float, Honoured("optimizer.warmup_ratio, of the run's steps")] = 0.0
    min_lr_ratio: Annotated[float, Honoured("optimizer.min_ratio, of a schedule that falls")] = 0.01
    warmup_style: Annotated[str | None, Honoured("optimizer.schedule: the old name of lr_scheduler_type")] = None
    lr_scheduler_type: Annotated[str, Honoured("optimizer.schedule")] = "constant"
    optimizer_type: Annotated[str, Refused("the Tinker API has AdamW alone.", "Leave it out, or write adam.")] = "adam"
    betas: Annotated[tuple[float, float], Honoured("optimizer.beta1, optimizer.beta2")] = (0.9, 0.999)
    weight_decay: Annotated[float, Copied("optimizer.weight_decay")] = 0.01
    clip_grad: Annotated[float, NoMeaning("trainer.grad_clip is what clips, as in Trinity.")] = 1.0


class Algorithm(Section):
    """`algorithm`."""

    algorithm_type: Annotated[str, Honoured("algorithm.type; Trinity's grpo is our grpo_std")] = "ppo"
    repeat_times: Annotated[
        int | None, Honoured("group_size; unset, the algorithm's documented default, and the run says so")
    ] = None  # fmt: skip
    optimizer: Optimizer = Optimizer()
    sample_strategy: Annotated[
        str | None, Honoured("demonstrations (mix); buffer.max_staleness (staleness_control)")
    ] = None
    sample_strategy_args: Annotated[Arguments | None, Honoured("with sample_strategy")] = None
    advantage_fn: Annotated[str | None, Honoured("algorithm.advantage")] = None
    advantage_fn_args: Annotated[Arguments | None, Honoured("algorithm.advantage, over its defaults")] = None
    kl_penalty_fn: Annotated[str | None, Honoured("algorithm.kl_penalty")] = None
    kl_penalty_fn_args: Annotated[Arguments | None, Honoured("algorithm.kl_penalty, over its defaults")] = None
    policy_loss_fn: Annotated[str | None, Honoured("algorithm.loss")] = None
    policy_loss_fn_args: Annotated[Arguments | None, Honoured("algorithm.loss, over its defaults")] = None
    kl_loss_fn: Annotated[str | None, Honoured("algorithm.kl")] = None
    kl_loss_fn_args: Annotated[Arguments | None, Honoured("algorithm.kl, over its defaults")] = None
    entropy_loss_fn: Annotated[str | None, Honoured("algorithm.entropy; exact where the server offers it")] = None
    entropy_loss_fn_args: Annotated[Arguments | None, Honoured("algorithm.entropy")] = None
    loss_agg_mode: Annotated[str | None, Honoured("algorithm.aggregate, over the whole batch")] = None
    enable_router_replay: Annotated[
        bool, Refused("routers of experts are not told by the Tinker API.", "Leave it out.")
    ] = False  # fmt: skip
    bypass_old_logprobs: Annotated[
        bool, Refused("old logprobs are the sampler's; nothing recomputes them.", "Leave it out, or write true.")
    ] = True  # fmt: skip
    rollout_correction: Annotated[
        Arguments | None,
        Refused("the sampler's own logprobs are the old ones, so there is nothing to correct.", "Leave it out."),
    ] = None
