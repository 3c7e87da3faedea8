"""Metrics under the names that Trinity-RFT gives to the same, for dashboards that were made for it.

Only what means the same is renamed; all else keeps its name, so that nothing is lost.
docs/reference/metrics.md has the table.

Example: trinity_name("reward/mean") == "critic/rewards/mean"
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
"""Ours to Trinity's, one to one."""

_REWARD = re.compile(r"reward/(?!mean$|std$)([^/]+)")
_EVAL = re.compile(r"eval/(?:([^/]+)/)?(pass@1|reward/mean)")


def trinity_name(name: str, held_out: str = "eval") -> str:
    """Trinity's name, or the same; `held_out` stands for held-out tasks that have no name of their own."""
    if name in TRINITY:
        return TRINITY[name]
    if found := _REWARD.fullmatch(name):
        return f"rollout/{found[1]}/mean"
    if found := _EVAL.fullmatch(name):
        value = "accuracy" if found[2] == "pass@1" else "reward"
        return f"eval/{found[1] or held_out}/{value}/mean"
    return name
