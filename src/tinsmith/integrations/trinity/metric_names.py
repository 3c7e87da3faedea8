"""Trinity-RFT's names for the metrics of a run, for dashboards that were made for it.

Only metrics with the same meaning are renamed; the others keep their names. docs/reference/metrics.md has the table.

A tracker with `names: trinity` sends them. Example: trinity_name("reward/mean") == "critic/rewards/mean"
"""

from __future__ import annotations

import re

TRINITY = {
    "reward/mean": "critic/rewards/mean",
    "reward/kl": "critic/kl",
    "reward/kl_coef": "critic/kl_coeff",
    "tokens/reply": "response_length/mean",
    "rollouts/cut": "response_length/clip_ratio",
    "optim/loss": "actor/final_loss",
    "optim/grad_norm": "actor/grad_norm",
    "optim/lr": "actor/lr",
    "optim/kl": "actor/kl_loss",
    "optim/kl_coef": "actor/kl_coef",
    "optim/kl_sample_train_v1": "actor/ppo_kl",
    "critic/explained_variance": "critic/vf_explained_var",
    "critic/value_mean": "critic/values/mean",
    "critic/return_mean": "critic/returns/mean",
    "time/step": "perf/time_per_step",
    "time/rollouts": "time/wait_explore_step",
    "time/update": "time/train_step",
}
"""Tinsmith's name -> Trinity's name."""

_REWARD = re.compile(r"reward/(?!mean$|std$)([^/]+)")
_EVAL = re.compile(r"eval/(?:([^/]+)/)?(pass@1|reward/mean)")


def trinity_name(name: str, held_out: str = "eval") -> str:
    """Return Trinity's name of a metric, or the same name if Trinity has no such metric.

    `held_out` is the name of held-out tasks without a name.
    """
    if name in TRINITY:
        return TRINITY[name]
    if match := _REWARD.fullmatch(name):
        return f"rollout/{match[1]}/mean"
    if match := _EVAL.fullmatch(name):
        value = "accuracy" if match[2] == "pass@1" else "reward"
        return f"eval/{match[1] or held_out}/{value}/mean"
    return name
