"""minds_RL's environments, by their ids, as environments of a run.

As in minds_RL, a name within the id decides, such as `./environments/ghost_trace`. An id without a known name is that
of a verifiers environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, did_you_mean, fault, note, settings
from tinsmith.integrations.minds.introspection.deception import Deception
from tinsmith.integrations.minds.introspection.entropy_intuition import EntropyIntuition
from tinsmith.integrations.minds.introspection.ghost_trace import GhostTrace
from tinsmith.integrations.minds.introspection.gradient_intuition import GradientIntuition
from tinsmith.integrations.minds.introspection.gradient_prophet import GradientProphet
from tinsmith.integrations.minds.introspection.sanity_check import SanityCheck
from tinsmith.integrations.minds.introspection.self_prediction import SelfPrediction
from tinsmith.rl.environments.base import EnvironmentOptions

Part = Mapping[str, Any]
Result = tuple[dict[str, Any], Translation]
"""Settings of an environment, and the notes, faults and settings of the run that come with it."""

TYPES: Mapping[str, type[EnvironmentOptions]] = {
    "gradient_prophet": GradientProphet,
    "gradient_intuition": GradientIntuition,
    "ghost_trace": GhostTrace,
    "self_prediction": SelfPrediction,
    "entropy_intuition": EntropyIntuition,
    "sanity_check": SanityCheck,
    "deception": Deception,
}
"""Name within an id -> the settings of the environment; the first one that an id contains counts."""
EVALUATIONS: Mapping[str, Part] = {
    "eval_math_static": {"type": "self_prediction", "seed": 42, "held_out": 50},
    "eval_ghost_static": {"type": "ghost_trace", "held_out": 50},
    "eval_ghost_ood": {"type": "ghost_trace", "words": "abstract", "seed": 42, "held_out": 100},
    "eval_calibration_static": {
        "type": "self_prediction",
        "operations": ["*"],
        "low": 10,
        "high": 99,
        "large_share": 0.0,
        "held_out": 100,
    },
    "eval_sanity_check": {"type": "sanity_check", "held_out": 120},
}
"""minds_RL's evaluations -> environments with tasks of the same kind, and the same numbers of tasks."""
_TRANSCRIPTS = ("deception", "scheming")
"""Names of the evaluation of transcripts, which minds_RL downloads."""
_STATIC_WORDS = "eval_ghost_static"
_RENAMED = {"num_examples": "size"}
"""minds_RL's argument -> ours."""
_INNER = "./environments/ghost_trace"
_STEP = {"optimizer": "adam_fresh", "learning_rate": 1e-4}
"""minds_RL's shadow step, with its default learning rate."""


def translate(identifier: str, arguments: Part, place: str, weight: float = 1.0) -> Result:
    """An environment by its id. `place` is its key in the file, such as envs[0]. Without settings, it is left out."""
    key = f"{place}.id"
    if not identifier.strip():
        return {}, fault(key, "it is empty.", "Set the path or the name of an environment.")
    if any(name in identifier for name in _TRANSCRIPTS):
        return _transcripts(arguments, place, weight)
    if evaluation := next((name for name in EVALUATIONS if name in identifier), ""):
        return _evaluation(evaluation, arguments, place)
    name = next((name for name in TYPES if name in identifier), "")
    if not name:
        return _verifiers(identifier, arguments), NOTHING
    translate_arguments = _TRANSLATED.get(name, _arguments)
    part, result = translate_arguments(name, arguments, f"{place}.args")
    return {"type": name, **part}, result


def title(identifier: str) -> str:
    """The last part of an id."""
    return PurePosixPath(identifier.strip()).name


def _verifiers(identifier: str, arguments: Part) -> dict[str, Any]:
    """An environment of verifiers. Its arguments are its own, but for the number of tasks."""
    limit = arguments.get("num_examples", -1)
    own = {key: value for key, value in arguments.items() if key != "num_examples"}
    return {"type": "verifiers", "id": identifier, "args": own, **({} if limit == -1 else {"select": {"limit": limit}})}


def _transcripts(arguments: Part, place: str, weight: float) -> Result:
    """The evaluation of transcripts, of a local file."""
    if weight:
        fix = "Write it in [[envs]] with weight = 0."
        return {}, fault(f"{place}.id", "no reply is sampled, so there is nothing to train on.", fix)
    if "transcripts" not in arguments:
        return {}, note(
            f"{place}: left out: minds_RL downloads its transcripts. To evaluate on transcripts of your own, set "
            "args.transcripts to a file with a JSON object on each line (docs/reference/introspection.md#deception)."
        )
    part, result = _arguments("deception", arguments, f"{place}.args")
    return {"type": "deception", **part}, result


def _evaluation(name: str, arguments: Part, place: str) -> Result:
    """One of minds_RL's evaluations; num_examples is the number of held-out tasks."""
    defaults = dict(EVALUATIONS[name])
    own = {key: value for key, value in arguments.items() if key != "num_examples"}
    if (count := arguments.get("num_examples", -1)) != -1:
        defaults["held_out"] = count
    result = note(f"{place}: {name}: tasks of {defaults['type']} of the same kind, with other words and numbers.")
    if name == _STATIC_WORDS and own.pop("seed", None) is not None:
        result += note(f"{place}.args.seed: not used: the words are those that ghost_trace holds out.")
    part, faults = _arguments(defaults["type"], own, f"{place}.args")
    return {**defaults, **part}, result + faults


def share_held_out_words(identifiers: Sequence[str], entries: Sequence[dict[str, Any]]) -> None:
    """Let eval_ghost_static have only words that the first ghost_trace of the mixture holds out."""
    words = (each for each in entries if each.get("type") == "ghost_trace" and each.get("words", "common") == "common")
    trained = next((each for each in words if each["weight"]), {})
    for identifier, entry in zip(identifiers, entries, strict=True):
        if _STATIC_WORDS in identifier:
            most = trained.get("held_out", GhostTrace.model_fields["held_out"].default)
            if isinstance(most, int) and isinstance(entry["held_out"], int):
                entry["held_out"] = min(entry["held_out"], most)
            entry["seed"] = trained.get("seed", 0)


def _arguments(name: str, arguments: Part, place: str) -> Result:
    """Arguments of an environment: minds_RL's, or fields of ours."""
    fields = TYPES[name].model_fields
    own = [field for field in fields if field not in ("type", "name", "weight")]
    part: dict[str, Any] = {}
    result = NOTHING
    for argument, value in arguments.items():
        field = _RENAMED.get(argument, argument)
        if argument in _RENAMED and (field not in fields or value == -1):
            if value != -1:
                result += note(f"{place}.{argument}: not used: {name} has a fixed list of tasks.")
        elif field in own:
            part[field] = value
        else:
            fix = did_you_mean(argument, [*own, *_RENAMED])
            result += fault(f"{place}.{argument}", f"{name} has no such argument.", fix)
    return part, result


def _gradient_intuition(name: str, arguments: Part, place: str) -> Result:
    """The environment of the tasks and the shadow step."""
    own = {"inner_env_id", "inner_env", "inner_env_args", "shadow_rank", "shadow_learning_rate"}
    part, result = _arguments(name, {key: value for key, value in arguments.items() if key not in own}, place)
    inner_id = str(arguments.get("inner_env_id", arguments.get("inner_env", _INNER)))
    inner_arguments = arguments.get("inner_env_args", {})
    if not isinstance(inner_arguments, Mapping):
        return part, fault(f"{place}.inner_env_args", "it is not a table.", "Write { name = value }.")
    inner, faults = translate(inner_id, inner_arguments, f"{place}.inner_env")
    if inner.get("type") in ("verifiers", "gradient_intuition"):
        fix = did_you_mean(inner_id, [each for each in TYPES if each != "gradient_intuition"])
        return part, fault(f"{place}.inner_env_id", f"'{inner_id}' cannot be the environment of the tasks.", fix)
    rate = arguments.get("shadow_learning_rate", _STEP["learning_rate"])
    result += settings({"shadow": {**_STEP, "learning_rate": rate}})
    if "shadow_rank" in arguments:
        result += note(f"{place}.shadow_rank: not used: the step starts from the policy's own adapter.")
    if "score" not in arguments:
        result += note(
            f"{place}: the prediction is scored against the change divided by its standard deviation for the probe; "
            'score = "absolute" scores it as minds_RL does, where always predicting 0 earns almost everything.'
        )
    return {**part, "inner": inner}, result + faults


_TRANSLATED: Mapping[str, Callable[[str, Part, str], Result]] = {"gradient_intuition": _gradient_intuition}
