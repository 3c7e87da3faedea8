"""The environment `verifiers_legacy`: environments of verifiers 0.1.9 to 0.3, whose module has `load_environment`.

These versions cannot be installed beside 0.4. The environment's own rollout runs in this process, with an OpenAI client
of the run's endpoint of the policy, so template and sampling are those of the run; its rubric gives the rewards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers.legacy_workflow import ROW, LegacyWorkflow
from tinsmith.integrations.verifiers.package import importable_name, installed_version, last_part
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.types import Message, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

OLDEST, NEWEST = (0, 1, 9), (0, 4)
"""The oldest version with this API, and the first one without it."""


class VerifiersLegacyEnvironment(EnvironmentOptions):
    """An environment of verifiers 0.1.9 to 0.3: its dataset, rollout and rubric."""

    type: Literal["verifiers_legacy"] = "verifiers_legacy"
    id: str
    """Environment: the name of an importable module with load_environment, or the path of its folder or .py file."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of load_environment."""

    @property
    @override
    def title(self) -> str:
        return self.name or last_part(self.id)

    @override
    def tasks(self) -> Sequence[Task]:
        return self._tasks(self._environment.get_dataset(), "")

    @override
    def held_out_tasks(self) -> Sequence[Task] | None:
        environment = self._environment
        rows = environment.get_eval_dataset()  # builds the dataset in versions that do so late
        return None if environment.eval_dataset is None else self._tasks(rows, "eval/")

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return LegacyWorkflow(self._environment, context)

    @cached_property
    def _environment(self) -> Any:
        require_legacy()
        name = importable_name(self.id)
        verifiers: Any = import_module("verifiers")
        try:
            environment = verifiers.load_environment(name, **self.args)
        except Exception as error:
            raise ConfigError(
                f"verifiers cannot load {name}: {type(error).__name__}: {error}",
                "Install it, or set the path of its folder; `args` are the arguments of its load_environment.",
            ) from error
        if vars(environment).get("message_type", "chat") != "chat":
            raise ConfigError(f"{name} completes text; only environments that chat are supported.", "Use another one.")
        return environment

    def _tasks(self, rows: Any, prefix: str) -> Sequence[Task]:
        return LazySequence(len(rows), lambda index: _task(rows[index], f"{self.title}/{prefix}{index}"))


def require_legacy() -> None:
    """Raises ConfigError unless a version of verifiers with this API is installed."""
    installed = installed_version()
    fix = "Install an older one, such as pip install verifiers==0.1.9, in a venv of its own."
    if installed is None:
        raise ConfigError("type: verifiers_legacy needs the package verifiers, which is not installed.", fix)
    numbers = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    if not OLDEST <= numbers < NEWEST:
        raise ConfigError(f"type: verifiers_legacy needs verifiers 0.1.9 to 0.3; {installed} is installed.", fix)


def _task(row: Mapping[str, Any], name: str) -> Task:
    prompt = row["prompt"]
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = tuple(Message(role=message["role"], content=_text(message["content"])) for message in said)
    return Task(id=name, messages=messages, answer=str(row.get("answer") or ""), extra={ROW: dict(row)})


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())
