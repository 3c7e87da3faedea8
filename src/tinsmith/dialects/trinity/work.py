"""What Trinity's workflows ask and what its reward functions are worth, as `workflow` and `rewards` of ours.

Leaves out where tasks come from (`data.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.data import INPUT, same, training
from tinsmith.dialects.trinity.keys import TrinityFile
from tinsmith.dialects.trinity.keys_buffer import Asked


@dataclass(frozen=True, slots=True)
class Work:
    """A workflow of Trinity's as one of ours, and what judges its replies where a file names nothing."""

    settings: Mapping[str, Any]
    reward: str = ""


_ASK, _MATH = {"type": "single_turn"}, {"type": "math"}
_BOXED = {
    "type": "single_turn",
    "system": "Work the problem out step by step, and put the final answer in \\boxed{}.",
}

WORKFLOWS: Mapping[str, Work] = {
    "simple_workflow": Work(_ASK),
    "math_workflow": Work(_MATH, "math_reward"),
    "math_boxed_workflow": Work(_BOXED, "math_boxed_reward"),
    "on_policy_distill_workflow": Work(_ASK),
    "on_policy_distill_math_workflow": Work(_MATH, "math_reward"),
}
"""Also by these names with async_ before them: here all are."""

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "math_reward": {"type": "math"},
    "math_boxed_reward": {"type": "math_boxed"},
    "format_reward": {"type": "format", "right": 0.1, "wrong": -0.1},
    "accuracy_reward": {"type": "math_verify"},
    "countdown_reward": {"type": "countdown"},
}


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`workflow`, `rewards`, and where evaluation judges otherwise, `eval.rewards`."""
    given, asked = file.buffer.explorer_input, training(file)
    if file.algorithm.algorithm_type in SUPERVISED:
        asked = []
    trained = _worked(asked, given.default_workflow_type, given.default_reward_fn_type, becoming)
    if trained is not None:
        becoming.put("workflow", trained[0])
        becoming.put("rewards", trained[1])
    tried = [(f"{INPUT}.eval_tasksets[{at}]", one) for at, one in enumerate(given.eval_tasksets)]
    usual = given.default_eval_workflow_type or given.default_workflow_type
    found = _worked(tried, usual, given.default_reward_fn_type, becoming)
    if found is None:
        return
    if trained is None:
        becoming.put("workflow", found[0])
    elif found[0] != trained[0]:
        cure = "Give them one workflow, or evaluate in a run of its own."
        becoming.fault(f"{tried[0][0]}.default_workflow_type", "evaluation asks as training does.", cure)
    if trained is None or found[1] != trained[1]:
        becoming.put("eval.rewards", found[1])


Asking = Sequence[tuple[str, Asked]]


def _worked(
    tasksets: Asking, usual: str | None, reward: str | None, becoming: Becoming
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The workflow and the rewards of these tasksets; None where there are none, or no right ones."""
    if not tasksets:
        return None
    own = same(tasksets, lambda one: one.default_workflow_type, "default_workflow_type", becoming)
    name = own or usual or "simple_workflow"
    work = WORKFLOWS.get(name.removeprefix("async_"))
    if work is None:
        key = f"{tasksets[0][0] if own else INPUT}.default_workflow_type"
        becoming.fault(key, f"there is no workflow '{name}' here.", _near(name, WORKFLOWS))
        return None
    judge = same(tasksets, lambda one: one.default_reward_fn_type, "default_reward_fn_type", becoming)
    key = f"{tasksets[0][0] if judge else INPUT}.default_reward_fn_type"
    judge = judge or reward or work.reward
    if not judge:
        becoming.fault(key, "nothing says what a reply is worth.", f"Set one of {', '.join(REWARDS)}.")
    elif judge not in REWARDS:
        becoming.fault(key, f"there is no reward '{judge}' here.", _near(judge, REWARDS))
    else:
        return dict(work.settings), [dict(REWARDS[judge])]
    return None


def _near(name: str, known: Mapping[str, Any]) -> str:
    found = get_close_matches(name, known, n=1)
    others = "Others are written anew, in a run file of ours: docs/workflows.md."
    return f"Did you mean '{found[0]}'?" if found else f"Known here: {', '.join(known)}. {others}"
