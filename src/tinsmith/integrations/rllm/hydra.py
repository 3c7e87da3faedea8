"""Hydra's `main`, for scripts that configure a run with rLLM's `tinker_rl_trainer` or `unified`.

    from tinsmith.rllm import hydra

    @hydra.main(config_path="pkg://rllm.trainer.config", config_name="tinker_rl_trainer", version_base=None)
    def main(config): ...

Hydra itself is not used: rLLM's configurations are built in. A configuration of one's own is a YAML file with a
defaults list that names one of them.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.integrations.rllm.files import read_config
from tinsmith.settings import parse_file

_PACKAGES = "pkg://rllm."
_FULL_ERROR = "HYDRA_FULL_ERROR"


def main(
    config_path: str | None = None, config_name: str | None = None, version_base: str | None = None
) -> Callable[[Callable[[DictConfig], Any]], Callable[..., Any]]:
    """Decorator: call a function with the configuration that the command line overrides.

    `config_path` is pkg://rllm.trainer.config, or a folder of YAML files relative to the script. The working folder
    does not change, and no output folder is made. `version_base` has no effect. An error of Tinsmith is printed without
    its traceback, unless HYDRA_FULL_ERROR is set.
    """

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(config: DictConfig | None = None) -> Any:
            if config is not None:
                return function(config)
            folder = Path(inspect.getfile(function)).parent
            return _run(function, folder, config_path, config_name)

        return run

    return decorate


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration `config_name`, tinker_rl_trainer or unified, with overrides."""
    return read_config({}, overrides, config_name)


def _run(function: Callable[[DictConfig], Any], folder: Path, path: str | None, name: str | None) -> Any:
    try:
        words = _parser().parse_args()
        if words.multirun:
            raise ConfigError("--multirun is not supported.", "Start the script once for each run.")
        path = words.config_dir or words.config_path or path
        config = _load(folder, path, words.config_name or name, words.overrides)
        for override in words.overrides:
            if override.lstrip("+~").startswith("hydra"):
                sys.stderr.write(f"note: {override}: Hydra's own settings have no effect\n")
        if words.cfg:
            sys.stdout.write(OmegaConf.to_yaml(config))
            return None
        return function(config)
    except TinsmithError as error:
        if os.environ.get(_FULL_ERROR):
            raise
        sys.stderr.write(f"error: {error.message}\n{error.hint}\n")
        sys.exit(2 if isinstance(error, UserError) else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Overrides: key=value, +key=value, ~key.", allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="settings, such as training.group_size=8")
    parser.add_argument("--config-name", "-cn", help="name of the configuration")
    parser.add_argument("--config-path", "-cp", help="folder of the configuration")
    parser.add_argument("--config-dir", "-cd", help="folder of the configuration")
    parser.add_argument("--cfg", "-c", choices=("job", "all"), help="print the configuration and end")
    parser.add_argument("--multirun", "-m", action="store_true", help="not supported")
    return parser


def _load(folder: Path, path: str | None, name: str | None, overrides: Sequence[str]) -> DictConfig:
    """The configuration `name` of rLLM, or of a YAML file in the folder `path`."""
    if not name:
        raise ConfigError("hydra.main has no config_name.", 'Write config_name="tinker_rl_trainer", or "unified".')
    name = name.removesuffix(".yaml")
    if path is None or path.startswith(_PACKAGES):
        return read_config({}, overrides, name)
    if "://" in path:
        raise ConfigError(
            f"The configurations of {path} cannot be read.", f"Use {_PACKAGES}trainer.config, or a folder."
        )
    return read_config(parse_file(folder / path / f"{name}.yaml"), overrides)
