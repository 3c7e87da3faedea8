"""Trinity's operators on what was rolled out, as `filters` of ours."""

from __future__ import annotations

from difflib import get_close_matches

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.schema import Operator, TrinityFile

PLACE = "data_processor.experience_pipeline.operators"
THRESHOLDS = {"reward_filter": ("reward", "low"), "reward_std_filter": ("reward_std", "threshold")}
PLAIN = {
    "dapo_dynamic_sampling": "reward_std",
    "mask_response_truncated": "cut",
    "invalid_reward_filter": "valid_reward",
}
MISSING = {
    "reward_shaping_mapper": "List further rewards, each with its weight, in a run file of ours.",
    "data_juicer": "Score replies by rewards of your own.",
}


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`filters`, in the file's order."""
    if file.algorithm.algorithm_type in SUPERVISED:
        why = f"{file.algorithm.algorithm_type} learns from data, so there are no rollouts to leave out."
        idle(file.data_processor, becoming, "data_processor.", why)
        return
    filters: list[dict[str, object]] = []
    for at, operator in enumerate(file.data_processor.experience_pipeline.operators):
        if (found := _filter(operator, f"{PLACE}[{at}]", becoming)) is not None:
            filters.append(found)
    if filters:
        becoming.put("filters", filters)


def _filter(operator: Operator, key: str, becoming: Becoming) -> dict[str, object] | None:
    name, args = operator.name, dict(operator.args)
    if name == "pass_rate_calculator":
        becoming.note(f"{key}: rewards reach the order of tasks by themselves.")
        return None
    if name in MISSING:
        becoming.fault(f"{key}.name", f"'{name}' is not here.", MISSING[name])
        return None
    if name not in THRESHOLDS and name not in PLAIN:
        known = [*THRESHOLDS, *PLAIN]
        near = get_close_matches(name, known, n=1)
        cure = f"Did you mean '{near[0]}'?" if near else f"Known here: {', '.join(known)}."
        becoming.fault(f"{key}.name", f"there is no operator '{name}'.", cure)
        return None
    found: dict[str, object] = {"type": PLAIN.get(name)}
    if name in THRESHOLDS:
        kind, to = THRESHOLDS[name]
        found = {"type": kind, to: args.pop("threshold", 0.0)}
    if name == "dapo_dynamic_sampling":
        becoming.note(f"{key}: groups are told apart by their whole rewards, not by their accuracy alone.")
    for unknown in args:
        becoming.fault(f"{key}.args.{unknown}", "there is no such argument.", "Leave it out.")
    return found
