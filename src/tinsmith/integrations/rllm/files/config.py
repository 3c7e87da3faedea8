"""The configuration object of a training script: rLLM's defaults with a script's values and overrides.

config = read_config({}, ["training.group_size=8", "trainer.logger=[console,wandb]"])
config.model.name                 # attribute access, as OmegaConf's DictConfig gives it
translate(config).settings        # nested settings of RunConfig
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tinsmith.dialects.base import NOTHING, Section, Translation, check_faults, fault, has_key, keys, note, section_of
from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files import algorithm
from tinsmith.integrations.rllm.files.dialect import (
    CONFIGS,
    defaults,
    defaults_list,
    is_unified,
    replace_time,
    translate_file,
    unified_defaults,
)
from tinsmith.integrations.rllm.files.overrides import Override, parse_override
from tinsmith.integrations.rllm.files.rollouts import SINGLE_ROLLOUTS
from tinsmith.integrations.rllm.files.schema import RllmFile
from tinsmith.integrations.rllm.files.schema_unified import UnifiedFile
from tinsmith.integrations.rllm.files.values import MIRRORS, Values
from tinsmith.overrides import COMMAND_LINE
from tinsmith.settings import build, nearest_name, paths, resolve_interpolations

PLACE = "the configuration"
_MISSING = object()
_ARGUMENTS, _ARGUMENT_NAMES = "rllm.workflow.workflow_args", ("gamma", "reward_bonus_coeff")


def read_config(values: Mapping[str, Any] | None = None, overrides: Sequence[str] = (), name: str = "") -> DictConfig:
    """The configuration `name` (tinker_rl_trainer or unified), with a script's values, then its overrides.

    Without a name, keys of the tree `rllm` mean unified. Keys that stand at several places have one value afterwards.
    Raises ConfigError if an override sets an unknown key (`+key=value` adds one for the script itself), and for an
    entry of Hydra's defaults list that is none of rLLM's.
    """
    check_faults(defaults_list((values or {}).get("defaults", ())), PLACE)
    parsed = [parse_override(override) for override in overrides]
    kind = _kind(values or {}, parsed, name)
    own = {key: value for key, value in replace_time(values or {}).items() if key not in ("hydra", "defaults")}
    tree, explicit = OmegaConf.create(_defaults(kind)), OmegaConf.create(own)
    tree.merge_with(explicit)
    for override in parsed:
        if not override.key.startswith("hydra."):
            _check_key(kind, tree, override)
            for target in (tree, explicit):
                _apply(target, override)
    _resolve_mirrors(tree, explicit, [override.key for override in parsed])
    OmegaConf.set_struct(tree, True)
    return tree


def translate(config: Mapping[str, Any] | DictConfig, estimators: Mapping[str, Any] | None = None) -> Translation:
    """The settings of RunConfig, with notes and faults, for a configuration of `read_config`.

    `estimators` are those that the script registers: each name with the settings of an advantage. `eval` is set even if
    there are no held-out tasks: leave it out then. Raises ConfigError for a value of the wrong type.
    """
    file, others = _file(config)
    return translate_file(file, estimators=estimators) + SINGLE_ROLLOUTS + _own_keys(type(file), others)


def workflow_args(config: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    """The arguments of a workflow class that the configuration sets: `gamma` and `reward_bonus_coeff`."""
    values, places = Values(_file(config)[0]), {name: f"{_ARGUMENTS}.{name}" for name in _ARGUMENT_NAMES}
    return {name: values.value(place) for name, place in places.items() if values.set_keys(place)}


def roles(
    config: Mapping[str, Any] | DictConfig, by_role: Mapping[str, Any], estimators: Mapping[str, Any] | None = None
) -> Translation:
    """`algorithm.roles`, from a mapping of roles to estimators, or to pairs of an estimator and a loss."""
    return algorithm.roles(Values(_file(config)[0]), by_role, estimators or {})


def _kind(values: Mapping[str, Any], overrides: Sequence[Override], name: str) -> type[Section]:
    """The keys of the configuration."""
    if name and name not in CONFIGS:
        raise ConfigError(f"There is no configuration '{name}' of rLLM here.", f"Known here: {', '.join(CONFIGS)}.")
    unified = is_unified(values) or any(override.key.partition(".")[0] == "rllm" for override in overrides)
    return CONFIGS[name or ("unified" if unified else "tinker_rl_trainer")]


def _defaults(kind: type[Section]) -> dict[str, Any]:
    return unified_defaults() if kind is UnifiedFile else defaults()


def _check_key(kind: type[Section], tree: DictConfig, override: Override) -> None:
    """Raises ConfigError for an override that sets or removes an unknown key."""
    key = override.key
    is_known = override.action != "remove" and has_key(kind, key.split("."))
    if override.action == "add" or is_known or OmegaConf.select(tree, key, default=_MISSING) is not _MISSING:
        return
    nearest = nearest_name(key, [entry.path for entry in keys(kind)], cutoff=0.75)
    question = f"Did you mean '{nearest}'? " if nearest else ""
    fix = f"{question}A key of the script's own is added with +{key}=VALUE."
    raise ConfigError(f"{COMMAND_LINE}: there is no key '{key}'.", fix)


def _apply(tree: DictConfig, override: Override) -> None:
    """Set, add or remove a key."""
    if override.action == "remove":
        parent, _, last = override.key.rpartition(".")
        section = OmegaConf.select(tree, parent) if parent else tree
        if isinstance(section, DictConfig) and last in section:
            del section[last]
        return
    try:
        OmegaConf.update(tree, override.key, replace_time(override.value), force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{COMMAND_LINE}: '{override.key}' cannot be set: {problem}.", "Check the key.") from error


def _resolve_mirrors(tree: DictConfig, explicit: DictConfig, overridden: Sequence[str]) -> None:
    """Give keys that stand at several places of the configuration the value that counts."""
    for places in MIRRORS:
        inside = [place for place in places if OmegaConf.select(tree, place, default=_MISSING) is not _MISSING]
        is_set = [place for place in places if OmegaConf.select(explicit, place) is not None]
        order = [*(place for place in is_set if place in overridden), *is_set, *inside]
        for place in inside if order else ():
            OmegaConf.update(tree, place, _written(tree, order[0]))


def _written(tree: DictConfig, key: str) -> Any:
    """The value at a key, with references as they are written."""
    parent, _, last = key.rpartition(".")
    section: Any = OmegaConf.to_container(OmegaConf.select(tree, parent))
    return section[last]


def _file(config: Mapping[str, Any] | DictConfig) -> tuple[Section, dict[str, Any]]:
    """The values that differ from the defaults, and those that belong to no section."""
    plain: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else dict(config)
    kind: type[Section] = UnifiedFile if "rllm" in plain else RllmFile
    changed = _changed(plain, _defaults(kind))
    if "${" in str(changed):
        changed = resolve_interpolations(changed, PLACE, plain)
    recognized, others = _of_rllm(kind, changed)
    return build(kind, recognized, PLACE), others


def _of_rllm(
    kind: type[Section], values: Mapping[str, Any], parents: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values whose keys rLLM has, and those of the script's own by dotted key."""
    recognized: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in values.items():
        path = [*parents, str(key)]
        if not has_key(kind, path):
            others[".".join(path)] = value
        elif isinstance(value, Mapping) and _is_section(kind, path):
            recognized[key], below = _of_rllm(kind, value, path)
            others |= below
        else:
            recognized[key] = value
    return recognized, others


def _is_section(kind: type[Section], path: Sequence[str]) -> bool:
    """Whether a key of rLLM's names a section."""
    for name in path[:-1]:
        kind = section_of(kind.model_fields[name]) or kind
    return section_of(kind.model_fields[path[-1]]) is not None


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ from the usual ones."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        default = usual.get(key, _MISSING)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            if below := _changed(value, default):
                changed[key] = below
        elif value != default:
            changed[key] = value
    return changed


def _own_keys(kind: type[Section], others: Mapping[str, Any]) -> Translation:
    """A note on keys that only the script reads, and a fault for one that looks misspelt."""
    result = NOTHING
    places = list(paths(kind))
    for key in others:
        if nearest := nearest_name(key, [each for each in places if each.count(".") == key.count(".")], cutoff=0.8):
            result += fault(key, "there is no such key.", f"Did you mean '{nearest}'?")
        else:
            result += note(f"{key}: no key of rLLM; only the script itself reads it.")
    return result
