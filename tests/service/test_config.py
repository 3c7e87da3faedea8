"""ServeConfig: defaults, validation, and settings files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.settings import build, read


def test_names_of_one_source_share_an_engine() -> None:
    config = ServeConfig(models=("a=src", "b", "org/c=src", "src"))
    assert config.sources() == {"src": ["a", "org/c", "src"], "b": ["b"]}
    assert config.engine_config("src").source == "src"


def test_models_accepts_a_single_string() -> None:
    assert build(ServeConfig, {"models": "org/name"}, "here").sources() == {"org/name": ["org/name"]}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"database": "mysql://x"}, "postgresql"),
        ({"api_key": "sk-1"}, "tml-"),
        ({"models": []}, "NAME"),
        ({"models": ["a", "a=b"]}, "once"),
        ({"models": ["a="]}, "NAME"),
        ({"vllm": {"rank": 64}}, "not used without sampler: vllm"),
        ({"sampler": "vllm", "engine": "fake"}, "engine: torch"),
        ({"sampler": "vllm", "vllm": {"rank": 24}}, "vllm.rank"),
        ({"sampler": "vllm", "quantize": "4bit"}, "vllm.args: .--quantization, bitsandbytes"),
        ({"sampler": "vllm", "vllm": {"args": ["--data-parallel-size", "2"]}}, "use --samplers"),
        ({"sampler": "vllm", "vllm": {"args": ["--port", "8000"]}}, "is for Tinsmith to set"),
        ({"sampler": "vllm", "vllm": {"args": ["--served-model-name=m"]}}, "is for Tinsmith to set"),
        ({"sampler": "vllm", "vllm": {"devices": "0"}, "cluster": {"samplers": 2}}, "vllm.devices"),
        ({"sampler": "vllm", "vllm": {"args": ["-tp", "2"]}, "cluster": {"samplers": 2}}, "use cluster.sampler_gpus"),
        ({"cluster": {"samplers": 2, "sampler_gpus": 2}}, "needs cluster.samplers and sampler: vllm"),
        ({"cluster": {"tls": True}}, "not used with one process"),
        ({"cluster": {"trainers": 2, "min_trainers": 1}}, "not used without cluster.address"),
        ({"cluster": {"address": "auto", "trainers": 2, "min_trainers": 3}}, "above cluster.trainers"),
        ({"cluster": {"address": "auto", "trainers": 2, "min_trainers": 1, "shard": True}}, "slices would grow"),
        ({"capture_every": 0}, "capture_every"),
        *[
            ({"engine": "fake", **unused}, f"{next(iter(unused))} is not used with engine: fake")
            for unused in (
                {"dtype": "float32"},
                {"device": "cpu"},
                {"threads": 1},
                {"quantize": "4bit"},
                {"check_memory": False},
                {"path": "fast"},
                {"pass_tokens": 9},
                {"recompute": "never"},
                {"sharing": "latency"},
                {"deterministic": True},
            )
        ],
        ({"store_cache": 9}, "store_cache is not used without store"),
        ({"cluster": {"cache": "/tmp/cache"}}, "cluster.cache is not used without store"),
        ({"cluster": {"data_timeout_s": 9}}, "cluster.data_timeout_s is not used with one training process"),
        ({"sampler_versions": 20}, "above max_sampler_versions: 16"),
        ({"public_url": "nonsense"}, "give a URL such as"),
        ({"public_url": "https://host?query"}, "give a URL such as"),
        ({"port": 70000}, "port"),
        ({"modles": ["a"]}, "Did you mean 'models'"),
    ],
)
def test_rejects_invalid_settings(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(ServeConfig, values, "here")


def test_vllm_settings_reach_the_engine() -> None:
    config = ServeConfig.model_validate({"sampler": "vllm", "vllm": {"rank": 64}}).engine_config("a")
    assert (config.sampler, config.vllm.rank) == ("vllm", 64)
    again = ServeConfig.model_validate_json(ServeConfig().model_dump_json())
    assert again == ServeConfig()


def test_is_loopback_holds_for_local_addresses_only() -> None:
    assert not any(ServeConfig(host=host).is_loopback for host in ("0.0.0.0", "box.example", "10.0.0.1"))
    assert all(ServeConfig(host=host).is_loopback for host in ("127.0.0.1", "localhost", "::1"))


def test_overrides_replace_settings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("models: [a=b]\nport: 9000\nengine: fake\n")
    config = read(ServeConfig, file, ["port=9001"])
    assert (config.models, config.port, config.engine) == (("a=b",), 9001, "fake")


@pytest.mark.parametrize(
    ("setting", "keeps"), [({}, True), ({"check_model": "once"}, True), ({"check_model": "always"}, False)]
)
def test_check_model_says_whether_an_engine_keeps_its_checks(setting: dict[str, str], keeps: bool) -> None:
    assert ServeConfig.model_validate(setting).engine_config("model").keeps_checks is keeps
