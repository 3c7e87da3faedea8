"""The table of algorithms: each name is a choice of advantage, loss and terms.

`grpo` is ours: sums over tokens, no division by deviations. The other names, and `grpo_std` in its place, are those of
Trinity-RFT with its defaults. What a run file gives lies on top, part by part: `loss: {clip_high: 0.3}` changes one
setting of the preset's loss; a part with a `type` of its own takes the preset's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Name = Literal[
    "grpo", "grpo_std", "ppo", "dapo", "reinforceplusplus", "rloo", "opmd", "asymre", "dpo", "topr", "cispo", "gspo",
    "sapo", "mix", "mix_chord", "raft", "sppo", "rec", "multi_step_grpo", "gigpo", "on_policy_distill", "jsd",
    "grpo_verl", "sft", "cpt",
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(Name)

LESSONS = ("sft", "cpt", "dpo")
"""Those that learn from data alone."""

_K2 = {"type": "k2", "coef": 0.001}
_NONE = {"type": "none"}


def _parts(
    advantage: str, loss: str, kl: Mapping[str, Any] = _NONE, aggregate: str = "token_mean", **more: Any
) -> dict[str, Any]:
    shift = {"shift": 0.1} if more.pop("asymmetric", False) else {}
    return {
        "advantage": {"type": advantage, **shift},
        "loss": {"type": loss},
        "kl": dict(kl),
        "aggregate": aggregate,
        **more,
    }


PRESETS: Mapping[str, dict[str, Any]] = {
    "grpo": {
        "advantage": {"type": "grpo", "normalize": "none", "std_threshold": 0.0},
        "loss": {"type": "importance_sampling"},
        "kl": _NONE,
        "aggregate": "token_sum",
    },
    "grpo_std": _parts("grpo", "ppo", _K2),
    "grpo_verl": _parts("grpo", "ppo", _K2),
    "ppo": _parts("gae", "ppo", _K2, critic={}),
    "dapo": _parts("grpo", "ppo"),
    "reinforceplusplus": _parts("reinforceplusplus", "ppo", _K2),
    "rloo": _parts("rloo", "ppo", _K2),
    "opmd": _parts("opmd", "opmd", _K2),
    "asymre": _parts("opmd", "opmd", asymmetric=True),
    "dpo": _parts("reinforce", "dpo"),
    "topr": _parts("reinforce", "topr", _K2),
    "cispo": _parts("grpo", "cispo", _K2),
    "gspo": _parts("grpo", "gspo", _K2, "seq_mean_token_mean"),
    "sapo": _parts("grpo", "sapo", _K2),
    "mix": _parts("grpo", "mix", _K2),
    "mix_chord": _parts("grpo", "mix_chord", _K2),
    "raft": _parts("best", "opmd"),
    "sppo": _parts("opmd", "sppo"),
    "rec": _parts("rec", "rec", _K2),
    "multi_step_grpo": _parts("step_wise_grpo", "ppo", _K2),
    "gigpo": _parts("gigpo", "ppo", _K2),
    "on_policy_distill": _parts("on_policy_distill", "ppo"),
    "jsd": _parts("jsd", "ppo"),
    "sft": _parts("reinforce", "sft"),
    "cpt": _parts("reinforce", "sft"),
}


def filled(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's parts with what was given on top."""
    parts = {key: dict(value) if isinstance(value, Mapping) else value for key, value in PRESETS[name].items()}
    for key, value in given.items():
        under = parts.get(key)
        same = isinstance(value, Mapping) and isinstance(under, dict) and value.get("type") in (None, under.get("type"))
        parts[key] = {**under, **value} if same and isinstance(under, dict) else value
    return parts
