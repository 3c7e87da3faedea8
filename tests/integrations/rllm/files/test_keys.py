"""Every key of rLLM's configurations has a fate, and the default that rLLM documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.integrations.rllm.files.keys import ADDED, NEWER, NEWER_SECTIONS, SEED, UNIFIED
from tinsmith.dialects.base import Copied, Ignored, Key, Refused, Translated, has_key, keys
from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files import read_config
from tinsmith.integrations.rllm.files import translate as translate_config
from tinsmith.integrations.rllm.files.dialect import file_keys, translate, unified_keys
from tinsmith.integrations.rllm.files.schema import RllmFile
from tinsmith.integrations.rllm.files.schema_unified import UnifiedFile
from tinsmith.rl.config import RunConfig
from tinsmith.settings import paths

CONFIGS = {"tinker_rl_trainer": {**SEED, **ADDED}, "unified": UNIFIED}


def leaves(config: DictConfig) -> dict[str, Any]:
    """Dotted keys and values of a configuration."""

    def below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in values.items():
            inside = isinstance(value, Mapping) and value
            result |= below(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
        return result

    plain: Any = OmegaConf.to_container(config, resolve=True)
    return below(plain, "")


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_rllm(name: str):
    values = leaves(read_config(name=name))
    assert {key: values[key] for key in CONFIGS[name]} == CONFIGS[name]
    newer = {key for key in values if key not in CONFIGS[name] and not key.startswith(NEWER_SECTIONS)}
    assert newer <= NEWER


@pytest.mark.parametrize(("name", "kind"), [("tinker_rl_trainer", RllmFile), ("unified", UnifiedFile)])
def test_documented_keys_have_a_fate(name: str, kind: Any):
    fates = {key.path: key.fate for key in keys(kind)}
    assert [key for key in CONFIGS[name] if key not in fates] == []
    assert has_key(kind, ["hydra", "run", "dir"])
    assert not has_key(kind, ["training", "group_sizes"])


def test_tables_have_each_key_once():
    listed = [key.path for key in (*file_keys(), *unified_keys())]
    assert len(listed) == len(set(listed))
    assert {type(key.fate) for key in (*file_keys(), *unified_keys())} == {Copied, Translated, Ignored, Refused}


def test_copied_keys_go_to_keys_of_a_run():
    own = set(paths(RunConfig))
    assert [key.path for key in file_keys() if isinstance(key.fate, Copied) and key.fate.to not in own] == []


def nested(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Values nested by their dotted keys."""
    tree = OmegaConf.create({})
    for key, value in pairs.items():
        OmegaConf.update(tree, key, value, force_add=True)
    plain: Any = OmegaConf.to_container(tree)
    return plain


def another(key: Key) -> Any:
    """A value other than the default."""
    match key.default:
        case bool():
            return not key.default
        case int() | float():
            return key.default + 1
        case dict():
            return {"some": 1}
        case tuple():
            return ["some"]
    if "bool" in key.type:
        return key.default is None or not key.default
    return 3 if "int" in key.type or "float" in key.type else "some"


ALL_KEYS = {"tinker_rl_trainer": list(keys(RllmFile)), "unified": list(keys(UnifiedFile))}


@pytest.mark.parametrize("name", ALL_KEYS)
def test_ignored_keys_are_noted_once(name: str):
    ignored = [key for key in ALL_KEYS[name] if isinstance(key.fate, Ignored)]
    mark = {"rllm.backend": "tinker"} if name == "unified" else {"training.group_size": 4}
    notes = translate(nested({**mark, **{key.path: another(key) for key in ignored}}), "file").notes
    for key in ignored:
        assert isinstance(key.fate, Ignored)
        matches = [text for text in notes if key.path in text.partition(": ")[0].split(", ")]
        assert len(matches) == 1, key
        assert key.fate.why in matches[0]


@pytest.mark.parametrize("name", ALL_KEYS)
def test_refused_keys_name_reason_and_fix(name: str):
    refused = [key for key in ALL_KEYS[name] if isinstance(key.fate, Refused)]
    mark = {"rllm.backend": "tinker"} if name == "unified" else {"training.group_size": 4}
    with pytest.raises(ConfigError) as refusal:
        translate(nested({**mark, **{key.path: another(key) for key in refused}}), "file")
    for key in refused:
        assert isinstance(key.fate, Refused)
        assert f"file: '{key.path}': {key.fate.reason} {key.fate.fix}" in str(refusal.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_of_rllm_are_valid_and_noted_nowhere(name: str):
    result = translate_config(read_config(name=name))
    assert result.faults == ()
    assert [text for text in result.notes if "sampling.temperature" not in text] == []


def test_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'training\.group_size'"):
        translate({"training": {"group_siz": 4}}, "file")
    with pytest.raises(ConfigError, match=r"Did you mean 'rllm\.trainer\.total_epochs'"):
        translate({"rllm": {"trainer": {"total_epoch": 4}}}, "file")
