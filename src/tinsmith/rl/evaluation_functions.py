"""Evaluations that users write: functions from the policy to metrics, called whenever a run evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from typing_extensions import override

from tinsmith.rl.plugins import CustomPart, Kind, await_if_needed, path_text
from tinsmith.rl.policy.sampling import Snapshot, request_seed
from tinsmith.rl.workflows.base import WorkflowContext, WorkflowPolicy

_FUNCTIONS = 2
"""Separates the sampling seeds of these evaluations from others."""


class CustomEvaluation(CustomPart):
    """User code: a function, async or not, from the policy to metrics.

    Its parameters are chosen by name among `policy`, a WorkflowPolicy whose conversations are not trained on, and
    `step`; others are its arguments. It returns a number, which is the metric eval/NAME, or a mapping of numbers, which
    are eval/NAME/KEY.

    Example: async def length(policy): return len((await policy.conversation().say("Write a poem.")).text)
    """

    kind: ClassVar[Kind] = "evaluation"
    type: Literal["custom"] = "custom"
    name: str = ""
    """Name in metrics. Empty: the name of the type, or of the function."""

    @override
    def check_code(self) -> None:
        _ = self._function

    @property
    def title(self) -> str:
        """The name in metrics."""
        return self.name or path_text(self.path).rpartition(":")[2]

    @cached_property
    def _function(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """The function and what it takes. Raises ValueError if the path or the arguments are wrong."""
        return self.function_of(named=("policy", "step"))

    async def metrics(self, policy: WorkflowPolicy, step: int) -> dict[str, float]:
        """Metrics of the policy. Raises ConfigError if the function fails, or returns anything but finite numbers."""
        function, taken = self._function
        values = {"policy": policy, "step": step}
        with self.errors_named():
            returned = await await_if_needed(function(**{name: values[name] for name in taken}))
        named = returned if isinstance(returned, Mapping) else {"": returned}
        prefix = f"eval/{self.title}"
        return {f"{prefix}/{key}".rstrip("/"): self.number(value, str(key)) for key, value in named.items()}


async def function_metrics(
    functions: Sequence[CustomEvaluation], step: int, policy: Snapshot, context: WorkflowContext, seed: int
) -> dict[str, float]:
    """Metrics of all functions, one after the other."""
    metrics: dict[str, float] = {}
    for number, function in enumerate(functions):
        of_function = WorkflowPolicy(policy, context, request_seed(seed, step, number, _FUNCTIONS))
        values = await function.metrics(of_function, step)
        if twice := sorted(values.keys() & metrics.keys()):
            raise function.fault(f"returned {twice[0]}, as another evaluation did", "Set a name: on one of them.")
        metrics |= values
    return metrics
