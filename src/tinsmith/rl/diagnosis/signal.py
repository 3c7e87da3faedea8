"""Findings about the signal: whether steps update the weights, and what keeps the others from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import thresholds
from tinsmith.rl.diagnosis.evidence import Evidence, finite
from tinsmith.rl.diagnosis.findings import Change, Finding
from tinsmith.rl.diagnosis.words import lower_rate, more_turns, number, percent, up

COMPARING = frozenset(("grpo", "rloo", "opmd", "rec", "best", "gigpo", "step_wise_grpo"))
"""Advantages that compare the replies of a group."""


class Reason(StrEnum):
    """Why a step made no update."""

    ALL_RIGHT = "all replies right"
    RIGHT_AND_CUT_OFF = "all replies right, and cut off"
    ALL_WRONG = "all replies wrong"
    EQUAL_REPLIES = "equal replies"
    CUT_OFF = "replies cut off"
    MAX_TURNS = "rollouts out of turns"
    FAILED = "failed rollouts"
    FILTERED = "all groups filtered"
    STALE = "too far off-policy"
    CONSTANT = "equal rewards in every group"
    WARM_UP = "warm-up of the critic"
    OTHER = "no row with a gradient"


_ALWAYS_EXPLAINED = ("few_signals", "equal_replies_in_groups")
_EXPLAINED = {
    Reason.CUT_OFF: ("cut_off",),
    Reason.RIGHT_AND_CUT_OFF: ("cut_off",),
    Reason.MAX_TURNS: ("max_turns",),
    Reason.FAILED: ("failing_rollouts", "failing_evaluations"),
    Reason.EQUAL_REPLIES: ("equal_replies_pay",),
    Reason.STALE: ("off_policy",),
}
"""Findings that have the same cause as a missing signal, by its reason."""


_ADVICE = {
    Reason.ALL_RIGHT: "Use harder tasks in tasks.train; the model can do these already.",
    Reason.ALL_WRONG: "Give partial credit with a graded reward, such as rewards: [{type: closeness}] for numbers, "
    "or let a stage with algorithm.type: sft come first.",
    Reason.FAILED: "Fix the cause: `tinsmith log RUN --level WARNING` shows the first error of each step.",
    Reason.OTHER: "Loosen algorithm.correction, algorithm.mask_truncated or filters: one of them leaves no token to "
    "train on.",
}
"""What to do against a missing signal where no single setting helps."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Steps that trained, and why the others did not.

    Example: Signal(updates=7, missing=Counter({Reason.ALL_WRONG: 3}))
    """

    updates: int
    missing: Counter[Reason]
    """Steps by the reason for which they made no update."""


def signal_of(evidence: Evidence) -> Signal:
    """Count the steps that updated the weights, and the reasons of the others."""
    missing = Counter[Reason]()
    for row in evidence.trained:
        if finite(row.get("optim/skipped")):
            missing[_reason(evidence, row)] += 1
    return Signal(evidence.updates, missing)


def _reason(evidence: Evidence, row: Mapping[str, Any]) -> Reason:
    """Why a step made no update, from its row."""
    if row["step"] <= evidence.number("algorithm.critic.warmup_steps"):
        return Reason.WARM_UP
    if finite(row.get("policy/guarded")) and "optim/ess_tokens" in row:
        return Reason.STALE
    failed = finite(row.get("rollouts/failed"))
    if failed and failed >= _rollouts(evidence, row) / 2:
        return Reason.FAILED
    right = evidence.right_groups(row)
    if (unfinished := _unfinished(evidence, row, right)) is not None:
        return unfinished
    if finite(row.get("groups/constant")) < 1:
        return Reason.FILTERED if finite(row.get("filters/dropped")) >= 1 else Reason.OTHER
    if finite(row.get("groups/all_right")) >= thresholds.SOLVED.value:
        return Reason.ALL_RIGHT
    if finite(row.get("groups/equal")) >= 1:
        return Reason.EQUAL_REPLIES
    return Reason.ALL_WRONG if finite(row.get("groups/all_wrong")) >= thresholds.SOLVED.value else Reason.CONSTANT


def _unfinished(evidence: Evidence, row: Mapping[str, Any], right: float) -> Reason | None:
    """The reason if most replies were cut off or out of turns; `right`: share of the groups that are all right."""
    cut, mask = finite(row.get("rollouts/cut")), bool(evidence.setting("algorithm.mask_truncated"))
    if cut > (thresholds.SOLVED.value if mask else thresholds.CUT_AT_FIRST.value):
        if right >= thresholds.SOLVED.value:
            return Reason.RIGHT_AND_CUT_OFF
        if right <= 1 - cut or not right:  # those that are cut off may be all that are not right
            return Reason.CUT_OFF
    is_out = finite(row.get("rollouts/max_turns")) > thresholds.CUT_AT_FIRST.value and not right
    return Reason.MAX_TURNS if is_out else None


def _rollouts(evidence: Evidence, row: Mapping[str, Any]) -> float:
    groups = finite(row.get("groups/sampled")) or evidence.number("groups_per_step", 1)
    return groups * evidence.number("group_size", 1)


def _none_of(steps: int) -> str:
    return "The only step has not" if steps == 1 else f"None of the {steps} steps"


def findings(evidence: Evidence, signal: Signal) -> Iterator[Finding]:
    """Findings about missing signals."""
    steps, trained = len(evidence.trained), signal.updates
    missing = signal.missing.copy()
    del missing[Reason.WARM_UP]
    if not missing or steps < evidence.least_steps:
        yield from _few_groups(evidence, signal)
        return
    reason, count = missing.most_common(1)[0]
    all_right = reason in (Reason.ALL_RIGHT, Reason.RIGHT_AND_CUT_OFF)
    if all_right and trained and _was_solved(evidence):
        return
    if (all_right or reason in (Reason.CONSTANT, Reason.EQUAL_REPLIES)) and trained and evidence.is_settled:
        return
    others = "the others" if trained else "them"
    where = "it" if steps == 1 else "each of them" if count == steps else f"{count} of {others}"
    mostly = f"in {where}, {_explained(evidence, reason)}"
    change, explains = _change(evidence, reason), (*_ALWAYS_EXPLAINED, *_EXPLAINED.get(reason, ()))
    if not trained:
        yield Finding(
            name="no_update",
            severity="error",
            sentence=f"{_none_of(steps)} updated the weights: {mostly}.",
            change=change,
            metric="optim/skipped",
            explains=explains,
        )
    elif trained / steps < thresholds.UPDATED.value and steps >= 2 * thresholds.STEPS.value:
        yield Finding(
            name="few_updates",
            severity="warning",
            sentence=f"Only {trained} of {counted(steps, 'step')} updated the weights: {mostly}.",
            change=change,
            metric="optim/skipped",
            explains=tuple(name for name in explains if name != "equal_replies_pay"),  # which explains this one
        )
    else:
        yield from _few_groups(evidence, signal)


def _few_groups(evidence: Evidence, signal: Signal) -> Iterator[Finding]:
    """Steps update, but few groups have anything to compare."""
    constant = evidence.recent("groups/constant")
    compares = evidence.setting("algorithm.advantage.type", "grpo") in COMPARING
    if constant is None or constant <= thresholds.CONSTANT.value or not compares or not signal.updates:
        return
    if evidence.converged or evidence.is_settled or _was_solved(evidence):
        return
    wrong, right = evidence.recent("groups/all_wrong") or 0.0, evidence.recent("groups/all_right") or 0.0
    parts = f" ({percent(wrong)} all wrong, {percent(right)} all right)" if wrong or right else ""
    reason = Reason.ALL_WRONG if wrong > right else Reason.CONSTANT
    yield Finding(
        name="few_signals",
        severity="warning",
        sentence=f"In {percent(constant)} of the groups of the last steps every reply has the same reward{parts}, so "
        "they teach nothing.",
        change=_change(evidence, reason),
        metric="groups/constant",
    )


def _was_solved(evidence: Evidence) -> bool:
    """Whether the tasks are solved now and were not in the first steps."""
    right = evidence.curve("groups/all_right")
    return evidence.solved and bool(right) and right[0] < thresholds.SOLVED.value


def _explained(evidence: Evidence, reason: Reason) -> str:
    """The reason as the rest of a sentence, with its numbers."""
    reward = evidence.recent("reward/mean")
    mean = "" if reward is None else f" (mean reward {number(reward)})"
    cut, limit = evidence.recent("rollouts/cut") or 0.0, evidence.number("sampling.max_tokens")
    cut_off = f"{percent(cut)} of the replies were cut off at sampling.max_tokens {limit:.0f}"
    match reason:
        case Reason.ALL_RIGHT:
            return "every reply was right, so there was nothing to compare"
        case Reason.ALL_WRONG:
            return f"every reply was wrong{mean}, so there was nothing to compare"
        case Reason.EQUAL_REPLIES:
            return "the replies to a task were all the same text"
        case Reason.CUT_OFF | Reason.RIGHT_AND_CUT_OFF:
            right = f"every reply was right{mean}, so there was nothing to compare, and {cut_off}"
            return f"{cut_off}{mean}" if reason == Reason.CUT_OFF else right
        case Reason.MAX_TURNS:
            turns = evidence.recent_of(evidence.max_turns) or 0.0
            return f"{percent(turns)} of the rollouts ended at the largest number of turns{mean}"
        case Reason.FAILED:
            return "at least half of the rollouts failed"
        case Reason.FILTERED:
            return "the filters dropped every group"
        case Reason.STALE:
            return "the batch was too far off-policy and was skipped (backoff)"
        case Reason.CONSTANT:
            return f"every reply to a task got the same reward{mean}"
        case _:
            return "no reply had an advantage or a gradient"


def _change(evidence: Evidence, reason: Reason) -> Change:
    """What to change against a missing signal."""
    size = int(evidence.number("group_size", 8))
    compared = reason in (Reason.ALL_WRONG, Reason.ALL_RIGHT, Reason.EQUAL_REPLIES, Reason.CONSTANT, Reason.OTHER)
    if compared and evidence.number("sampling.temperature", 1.0) == 0:
        same = "At 0 all replies to a task are the same."
        return Change(setting="sampling.temperature", value=1, advice=same)
    if compared and size == 1:
        return Change(setting="group_size", value=8, advice="A single reply has no other to be compared with.")
    match reason:
        case Reason.CUT_OFF | Reason.RIGHT_AND_CUT_OFF:
            longer = up(2 * evidence.number("sampling.max_tokens", 128))
            harder = "If whole replies are all right too, use harder tasks in tasks.train, or a graded reward."
            advice = harder if reason == Reason.RIGHT_AND_CUT_OFF else ""
            return Change(setting="sampling.max_tokens", value=longer, advice=advice)
        case Reason.ALL_WRONG if "closeness" in str(evidence.setting("rewards")):
            return Change(
                advice="Give partial credit to replies that are no bare number, which is all that closeness reads, or "
                "let a stage with algorithm.type: sft come first."
            )
        case Reason.MAX_TURNS:
            return more_turns(evidence)
        case Reason.EQUAL_REPLIES:
            return lower_rate(evidence, 10, "Then start again from weights whose replies differ.")
        case Reason.FILTERED:
            return Change(
                setting="filter_refills", value=4, advice="Other groups then take their place. Or loosen filters."
            )
        case Reason.STALE:
            return Change(setting="staleness", value=max(0, int(evidence.number("staleness")) - 1))
        case Reason.CONSTANT:
            graded = "Or use a graded reward, so that the rewards of a task differ."
            return Change(setting="group_size", value=2 * size, advice=graded)
        case _:
            return Change(advice=_ADVICE[reason])
