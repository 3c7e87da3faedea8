"""Checks of an environment of verifiers: what this machine and the endpoint of the policy cannot provide.

Each check raises ConfigError before the run; verifiers would fail every rollout.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    import verifiers.v1 as vf

_DIALECTS = {"codex": "Responses", "claude-code": "Anthropic's messages"}
"""The API that a program speaks, if it has no other."""
_CHAT = "chat_completions"
_NO_CONTAINER = "subprocess"


def check_config(name: str, config: vf.EnvConfig) -> None:
    """Check the programs, runtimes and judges of the environment `name`."""
    for role, agent in _roles(config).items():
        _check_program(name, role, agent)
        if agent.runtime.type == "docker" and shutil.which("docker") is None:
            raise ConfigError(
                f"{name}: the runtime of {role} is docker, and there is no program docker on this machine.",
                f"Install Docker, or set another env.{role}.runtime.",
            )
    for judge in config.taskset.task.judges:
        _check_judge(name, judge)


def check_task(environment: vf.Env, task: vf.Task, name: str) -> None:
    """Check that a role can have the container of a task."""
    where = f"{name}: task {task.data.idx}"
    if (image := task.data.image) is None and not task.NEEDS_CONTAINER:
        return
    roles = _roles(environment.config)
    if all(agent.runtime.type == _NO_CONTAINER for agent in roles.values()):
        wanted = f"the container image {image}" if image else "a container"
        raise ConfigError(
            f"{where} needs {wanted}, and no role has a container.",
            f"Set env.{next(iter(roles), 'agent')}.harness to a program of verifiers, such as {{id: bash}}, and its "
            "runtime to {type: docker}.",
        )


def _roles(config: vf.EnvConfig) -> dict[str, vf.AgentConfig]:
    from verifiers.v1 import AgentConfig

    values = {role: getattr(config, role) for role in type(config).model_fields}
    return {role: value for role, value in values.items() if isinstance(value, AgentConfig)}


def _check_program(name: str, role: str, agent: vf.AgentConfig) -> None:
    """Check its runtime and its API; with a client of its own it may speak what that one understands."""
    from verifiers.v1.utils.loaders import harness_class

    harness = agent.harness
    if harness is None:
        return
    if agent.runtime.type == _NO_CONTAINER and harness_class(harness.id).NEEDS_CONTAINER:
        raise ConfigError(
            f"{name}: the harness {harness.id} of {role} runs only in a container.",
            f"Set env.{role}.runtime to {{type: docker}}.",
        )
    if agent.client is not None:
        return
    transport = str(harness.model_dump().get("transport", _CHAT))
    dialect = _DIALECTS.get(harness.id.replace("_", "-")) or (transport if transport != _CHAT else None)
    if dialect is not None:
        raise ConfigError(
            f"{name}: the harness {harness.id} of {role} speaks {dialect}; the policy answers chat completions only.",
            f"Set env.{role}.harness to a program that speaks chat completions, such as {{id: bash}}; pi and kimi-code "
            f"do with transport: {_CHAT}.",
        )


def _check_judge(name: str, judge: vf.JudgeConfig) -> None:
    """A judge needs a key where one is named, and at verifiers' default, a hosted endpoint."""
    from verifiers.v1.configs.client import PRIME_INFERENCE_HOST, resolve_api_key

    hosted = (urlsplit(judge.base_url).hostname or "").endswith(PRIME_INFERENCE_HOST)
    if (hosted or "api_key_var" in judge.model_fields_set) and resolve_api_key(judge) == "EMPTY":
        raise ConfigError(
            f"{name}: the judge {judge.name or judge.id} calls {judge.base_url}, and {judge.api_key_var} is not set.",
            "Set the variable, or base_url, model and api_key_var of the judge to an endpoint of your own, such as "
            "tinsmith serve.",
        )
