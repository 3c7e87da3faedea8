"""Trinity's names of workflows and reward functions, with their arguments, as parts of ours.

Leaves out how tasksets choose among them (`work.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.dialects.trinity.arguments import Argument, Only, Part, To

THINK_BOXED = (
    "First think the problem through between <think> and </think>. Then write the solution, with the final answer in "
    "\\boxed{}."
)
_BOXED = {"system": "Work the problem out step by step, and put the final answer in \\boxed{}."}


@dataclass(frozen=True, slots=True)
class Work:
    """A workflow as one of ours, and what judges its replies where a file names nothing."""

    part: Part
    """Arguments named ^NAME go to the reward."""
    reward: str = ""
    rubric: str = ""
    """With a judge: the field of a row that holds its rubric."""
    extra: tuple[str, ...] = ()
    """Fields of a row that it reads beside question and answer."""


JUDGE = "(judge)"
"""In place of a reward's name: the first of explorer.auxiliary_models."""

_PLAIN, _MATH = Part("single_turn"), Part("math")
_THINK: Mapping[str, Argument] = {
    "with_think": To(("^think",)),
    "format_score_coef": To(("^form",)),
    "use_base": Only(False, "Prompts go through the chat template: set model.custom_chat_template to '{{ … }}'."),
}

WORKFLOWS: Mapping[str, Work] = {
    "simple_workflow": Work(_PLAIN),
    "math_workflow": Work(_MATH, "math_reward"),
    "math_boxed_workflow": Work(Part("single_turn", _THINK, _BOXED), "math_boxed_reward"),
    "math_eval_workflow": Work(Part("single_turn", settings=_BOXED), "math_boxed_reward"),
    "math_rm_workflow": Work(_MATH, JUDGE),
    "rubric_judge_workflow": Work(_PLAIN, JUDGE, rubric="rubric", extra=("rubric",)),
    "on_policy_distill_workflow": Work(_PLAIN),
    "on_policy_distill_math_workflow": Work(_MATH, "math_reward"),
}
"""Also by these names with async_ before them: here all are."""


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    words: tuple[str, ...]
    cure: str


_WRITTEN = "and name it as FILE.NAME, with --plugin-dir: docs/trinity.md#code-of-your-own."
_ELSEWHERE = (
    _Elsewhere(
        ("agentscope", "as_react", "react", "search", "tool_call"),
        f"Write the agent as an async function of (task, client, model), {_WRITTEN}",
    ),
    _Elsewhere(
        ("alfworld", "frozen_lake", "sciworld", "webshop", "intercode", "sudoku"),
        f"Write the world as a class derived from Environment, {_WRITTEN}",
    ),
    _Elsewhere(
        ("ruler",), "Judges that rank a whole group are not here; use rubric_judge_workflow or math_rm_workflow."
    ),
    _Elsewhere(
        ("rubric_judge_openai",),
        "Use rubric_judge_workflow, with external_model_config.enable in the first of explorer.auxiliary_models.",
    ),
    _Elsewhere(("_mm_",), "Models with images are not served."),
)


def elsewhere(name: str) -> str | None:
    """The cure for a workflow of Trinity's that is not here; None for a name that is not Trinity's either."""
    return next((one.cure for one in _ELSEWHERE if any(word in name for word in one.words)), None)


REWARDS: Mapping[str, Part] = {
    "math_reward": Part("math"),
    "math_boxed_reward": Part("math_boxed", {"with_think": To(("think",)), "format_score_coef": To(("form",))}),
    "format_reward": Part("format", {"pattern": To(("pattern",))}, {"right": 0.1, "wrong": -0.1}),
    "accuracy_reward": Part("math_verify"),
    "countdown_reward": Part("countdown"),
    "math_dapo_reward": Part(
        "math_boxed",
        {
            "enable_overlong_penalty": To(("^overlong",)),
            "max_response_length": To(("^max_tokens",)),
            "cache_length": To(("^margin",)),
            "penalty_factor": To(("^weight",)),
        },
    ),
}
"""What is named ^NAME belongs to the penalty for length, a reward of its own."""

READING = frozenset(REWARDS) - {"format_reward"}
"""Rewards that compare with an answer, which every row must have then."""
