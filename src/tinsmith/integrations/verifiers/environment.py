"""Configuration of a verifiers environment: the options of a run file as verifiers' own config.

Roles that name no program get the harness of the run file; verifiers' own defaults are a shell for the model and a
hosted sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tinsmith.chat.request import describe_errors
from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers.checks import check_config

if TYPE_CHECKING:
    import verifiers.v1 as vf

DIRECT = "direct"
NULL = "null"


def load(name: str, args: Mapping[str, Any], env: Mapping[str, Any], harness: str) -> vf.Env:
    """The environment with the taskset `name`. Raises ConfigError for options that it does not take."""
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    try:
        kind = env_config_type(name, str(env.get("id", "")))
        roles = {role: _role(name, role, default, env, harness) for role, default in _roles(kind).items()}
        config = kind.model_validate({**env, **roles, "taskset": {**args, "id": name}})
        check_config(name, config)
        return load_environment(config)
    except ValidationError as error:
        raise ConfigError(
            f"{name}: {describe_errors(error.errors())}",
            "`args` are the options of the taskset; `env` those of the environment and its roles.",
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"verifiers cannot load {name}: {error}", "Install it, or set the path of its folder."
        ) from error


def _roles(kind: type[vf.EnvConfig]) -> dict[str, vf.AgentConfig]:
    from verifiers.v1 import AgentConfig

    defaults = {name: field.default for name, field in kind.model_fields.items()}
    return {name: default for name, default in defaults.items() if isinstance(default, AgentConfig)}


def _role(name: str, role: str, default: vf.AgentConfig, env: Mapping[str, Any], harness: str) -> dict[str, Any]:
    """The options of a role with its harness and runtime. Raises ConfigError if code would run unasked."""
    options = dict(env.get(role, {}))
    own = dict(options.pop("harness", None) or {})
    pinned = own.get("id") or _pinned(name, default)
    chosen = harness if pinned is None or (pinned == NULL and harness == DIRECT) else pinned
    named = "runtime" in options or "runtime" in default.model_fields_set
    if chosen == DIRECT:
        from tinsmith.integrations.verifiers import direct

        runtime = options.get("runtime", {"type": "subprocess"})
        if runtime != {"type": "subprocess"}:
            raise ConfigError(
                f"{name}: the harness {DIRECT} of {role} runs in this process and has no runtime.",
                f'Remove env.{role}.runtime, or set harness: "{NULL}" or another of verifiers.',
            )
        return {**options, "harness": {**own, "id": direct.ID}, "runtime": runtime}
    if not named and chosen == NULL:
        options["runtime"] = {"type": "subprocess"}
    elif not named:
        raise ConfigError(
            f"{name}: the harness {chosen} of {role} lets the model run programs, and no runtime is set.",
            f"Set env.{role}.runtime to {{type: docker}}, or to {{type: subprocess}} for this machine itself.",
        )
    return {**options, "harness": {**own, "id": chosen}}


def _pinned(name: str, default: vf.AgentConfig) -> str | None:
    """Harness that the environment names for a role: its config's, or the one that the taskset brings."""
    from verifiers.v1.utils.loaders import default_harness_id

    if default.harness is not None:
        return default.harness.id
    brought = default_harness_id(name)
    return brought if brought == name else None
