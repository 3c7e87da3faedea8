"""Trinity's corrections against the difference between sampler and trainer: `rollout_correction`, router replay.

The arguments of `rollout_correction` are verl's.
"""

from __future__ import annotations

from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, combine, did_you_mean, fault, note, settings, translates
from tinsmith.integrations.trinity.files.name_tables import SUPERVISED
from tinsmith.integrations.trinity.files.schema import Algorithm, TrinityFile

KEY = "algorithm.rollout_correction"
_DEFAULTS: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "rollout_rs_threshold_lower": None,
    "rollout_token_veto_threshold": None,
    "bypass_mode": None,
    "loss_type": "ppo_clip",
    "use_policy_gradient": False,
}
"""verl's arguments, with the values that change nothing here."""
_UNSUPPORTED = ("rollout_is_batch_normalize", "rollout_token_veto_threshold", "loss_type", "use_policy_gradient")


@translates(
    Algorithm,
    rollout_correction="algorithm.correction: tis with level and cap for rollout_is, a mask with bounds for rollout_rs",
)
def rollout_correction(file: TrinityFile) -> Translation:
    """`algorithm.correction`."""
    own, result = file.algorithm.rollout_correction, NOTHING
    if not own:
        return NOTHING
    if file.algorithm.algorithm_type in SUPERVISED:
        return note(f"{KEY}: {file.algorithm.algorithm_type} trains on demonstrations and samples nothing.")
    for name, value in own.items():
        if name not in _DEFAULTS:
            result += fault(f"{KEY}.{name}", "there is no such argument.", did_you_mean(name, _DEFAULTS))
        elif name in _UNSUPPORTED and value not in (None, _DEFAULTS[name]):
            result += fault(f"{KEY}.{name}", f"{value!r} is not supported.", "Leave it out.")
    arguments = {**_DEFAULTS, **own}
    if arguments["bypass_mode"] is not None:
        result += note(
            f"{KEY}.bypass_mode: rollout_is compares with the trainer's logprobs before a batch, either way."
        )
    return result + _weights(arguments) + _mask(arguments)


def _weights(arguments: dict[str, Any]) -> Translation:
    level, cap = arguments["rollout_is"], arguments["rollout_is_threshold"]
    if level is None:
        return NOTHING
    if level not in ("token", "sequence"):
        return fault(f"{KEY}.rollout_is", f"there is no '{level}'.", "It is token or sequence.")
    if not _is_positive(cap):
        return fault(f"{KEY}.rollout_is_threshold", f"{cap!r} is not a weight.", "Set a number above 0.")
    return settings(
        {f"algorithm.correction.{key}": value for key, value in (("type", "tis"), ("level", level), ("cap", cap))}
    )


def _mask(arguments: dict[str, Any]) -> Translation:
    level, high, low = (
        arguments[name] for name in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower")
    )
    if level is None:
        return NOTHING
    if level == "token":
        fix = "Use sequence or geometric."
        return fault(f"{KEY}.rollout_rs", "tokens are masked only where the advantage pushes them further.", fix)
    if level not in ("sequence", "geometric"):
        return fault(f"{KEY}.rollout_rs", f"there is no '{level}'.", "It is sequence or geometric.")
    high = arguments["rollout_is_threshold"] if high is None else high
    low = 1 / high if low is None and _is_positive(high) else low
    bounds = {
        "rollout_rs_threshold": (high, _is_positive(high) and high > 1, "above 1"),
        "rollout_rs_threshold_lower": (
            low,
            low == 0 or (low is not None and _is_positive(low) and low < 1),
            "0 or more, and below 1",
        ),
    }
    if wrong := [(name, value, fix) for name, (value, fits, fix) in bounds.items() if not fits]:
        return combine(
            fault(f"{KEY}.{name}", f"{value!r} is not a bound.", f"Set a number {fix}.") for name, value, fix in wrong
        )
    return settings(
        {
            "algorithm.correction.mask": level,
            "algorithm.correction.mask_low": low,
            "algorithm.correction.mask_high": high,
        }
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


@translates(Algorithm, enable_router_replay="model.router_replay: replay; needs a Tinsmith server")
def router_replay(file: TrinityFile) -> Translation:
    """`model.router_replay`."""
    if not file.algorithm.enable_router_replay:
        return NOTHING
    if file.algorithm.algorithm_type in SUPERVISED or file.mode == "bench":
        return note("algorithm.enable_router_replay: this run trains on no samples of the policy.")
    return settings({"model.router_replay": "replay"})
