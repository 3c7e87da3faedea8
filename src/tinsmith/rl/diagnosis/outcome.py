"""Findings about what comes out: rewards, held-out tasks, lengths, and rollouts that fail or are cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import thresholds
from tinsmith.rl.diagnosis.evidence import Evidence, ends_size, finite
from tinsmith.rl.diagnosis.findings import Change, Finding
from tinsmith.rl.diagnosis.words import RATE, lower_rate, more_turns, number, percent, rounded, up


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Findings about the outcome."""
    yield from _failed(evidence)
    yield from _cut_off(evidence)
    yield from _max_turns(evidence)
    if not evidence.trained or evidence.updates:  # else the weights are those of the start
        yield from _lengths(evidence)
        yield from _reward(evidence)
        yield from _below_constant(evidence)
        yield from _held_out(evidence)
    yield from _demonstrations(evidence)
    yield from _pairs(evidence)


def _failed(evidence: Evidence) -> Iterator[Finding]:
    sampled = [row for row in evidence.steps if "rollouts/failed" in row]
    size = evidence.number("groups_per_step", 1) * evidence.number("group_size", 1)
    failed = sum(finite(row["rollouts/failed"]) for row in sampled)
    share = failed / (size * len(sampled)) if sampled else 0.0
    tasks = evidence.curve("eval/tasks")
    lost = sum(evidence.curve("eval/failed")) / (sum(tasks) or 1.0) / evidence.number("eval.num_samples", 1)
    if share > thresholds.FAILED.value and len(sampled) >= evidence.least_steps:
        answers = f", and {percent(min(1.0, lost))} of the answers of evaluations, which count as wrong"
        yield Finding(
            name="failing_rollouts",
            severity="error" if share > thresholds.UPDATED.value else "warning",
            sentence=f"{counted(int(failed), 'rollout')} failed, {percent(min(1.0, share))} of all"
            f"{answers if lost > thresholds.FAILED.value else ''}.",
            change=Change(
                advice="Fix the cause: `tinsmith log RUN --level WARNING` shows the first error of each step."
            ),
            metric="rollouts/failed",
            explains=("failing_evaluations",),
        )
    if lost > thresholds.FAILED.value:
        yield Finding(
            name="failing_evaluations",
            severity="warning",
            sentence=f"{percent(min(1.0, lost))} of the answers of evaluations failed, and count as wrong.",
            change=Change(advice="Fix the cause: `tinsmith log RUN` shows their errors."),
            metric="eval/failed",
        )


def _cut_off(evidence: Evidence) -> Iterator[Finding]:
    shares = evidence.curve("rollouts/cut")
    limit = evidence.number("sampling.max_tokens")
    if not shares or evidence.solved:
        return
    recent = evidence.recent("rollouts/cut")
    falling = shares[-1] < 0.8 * shares[0] and not evidence.ended
    if recent is not None and recent > thresholds.CUT.value and not falling:
        rise = f", {percent(shares[0])} at first" if recent - shares[0] > thresholds.CUT.value else ""
        yield Finding(
            name="cut_off",
            severity="warning",
            sentence=f"{percent(recent)} of the replies are cut off at sampling.max_tokens {limit:.0f}{rise}; rewards "
            "read unfinished text.",
            change=_overlong(limit) if rise else Change(setting="sampling.max_tokens", value=up(2 * max(1.0, limit))),
            metric="rollouts/cut",
            explains=("few_signals",),
        )


def _max_turns(evidence: Evidence) -> Iterator[Finding]:
    """Rollouts that do not end by themselves, in a run that does not improve by it."""
    shares = evidence.max_turns
    recent = evidence.recent_of(shares)
    if recent is None or recent <= thresholds.CUT.value or evidence.improves or evidence.solved:
        return
    if shares[-1] < 0.8 * shares[0] and not evidence.ended:
        return
    yield Finding(
        name="max_turns",
        severity="warning",
        sentence=f"{percent(recent)} of the rollouts end at the largest number of turns, not by themselves.",
        change=more_turns(evidence),
        metric="rollouts/max_turns",
        explains=("few_signals",),
    )


def _overlong(limit: float) -> Change:
    reward = f"{{type: overlong, max_tokens: {limit:.0f}, margin: {max(1.0, limit / 4):.0f}}}"
    return Change(advice=f"Add {reward} to rewards.")


def first_batch(settings: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """A note if most replies of the first batch are cut off; empty if not."""
    evidence, cut = Evidence(settings, [row]), finite(row.get("rollouts/cut"))
    if cut <= thresholds.CUT_AT_FIRST.value:
        return ""
    limit = evidence.number("sampling.max_tokens")
    return (
        f"{percent(cut)} of the first replies are cut off at sampling.max_tokens {limit:.0f}. Unless the model is to "
        f"learn to be shorter, set sampling.max_tokens: {up(2 * max(1.0, limit))}."
    )


def _lengths(evidence: Evidence) -> Iterator[Finding]:
    ends = evidence.ends("tokens/reply")
    if ends is None or ends.first <= 0 or evidence.improves or evidence.solved:
        return
    values = f"{number(ends.first)} → {number(ends.last)} tokens"
    if ends.last > thresholds.LENGTH.value * ends.first:
        yield Finding(
            name="lengths_grow",
            severity="warning",
            sentence=f"Replies have grown ({values}), and the reward has not.",
            change=_overlong(evidence.number("sampling.max_tokens")),
            metric="tokens/reply",
        )
    elif ends.last < thresholds.LENGTH_FALL.value * ends.first:
        yield Finding(
            name="lengths_shrink",
            severity="warning",
            sentence=f"Replies have shrunk ({values}), and the reward has not risen.",
            change=lower_rate(evidence, 3),
            metric="tokens/reply",
        )


def _reward(evidence: Evidence) -> Iterator[Finding]:
    """A reward that falls, or that does not rise at all."""
    ends = evidence.reward
    if ends is None or not evidence.trained or evidence.solved:
        return
    curve = _smoothed(evidence.curve("reward/mean"))
    best, low = max(curve), min(curve)
    step = curve.index(best) + ends.count - len(curve) + 1
    drop = best - curve[-1]
    scale = max(best - low, evidence.recent("reward/std") or 0.0, 1e-9)
    if drop > thresholds.FALL.value * scale and drop > thresholds.GAIN.value * ends.error and drop > 0.1 * abs(best):
        yield Finding(
            name="reward_falls",
            severity="error",
            sentence=f"The reward fell from {number(best)} around step {step} to {number(curve[-1])}.",
            change=lower_rate(evidence, 3, f"Continue from a checkpoint near step {step}."),
            metric="reward/mean",
        )
    elif evidence.ended and not ends.rose and not evidence.is_near_top:
        yield Finding(
            name="reward_flat",
            severity="warning",
            sentence=f"The reward has not risen in {counted(ends.count, 'step')}: {number(ends.first)} → "
            f"{number(ends.last)}, within noise.",
            change=_more_signal(evidence),
            metric="reward/mean",
        )


def _more_signal(evidence: Evidence) -> Change:
    rate = max(evidence.curve("optim/lr"), default=0.0)
    if 0 < rate < 1e-4:
        return Change(setting=RATE, value=rounded(max(1e-4, 3 * rate)))
    if rate > thresholds.RATE_HIGH.value:
        return lower_rate(evidence, 10)
    groups = int(2 * evidence.number("groups_per_step", 16))
    return Change(setting="groups_per_step", value=groups, advice="Take more steps too.")


def _below_constant(evidence: Evidence) -> Iterator[Finding]:
    """A policy that one fixed answer would beat."""
    for measure, baseline in (("eval/pass@1", "eval/constant_pass@1"), ("eval/reward/mean", "eval/constant_reward")):
        results, constant = evidence.curve(measure), evidence.curve(baseline)
        if len(results) > 1 and constant and evidence.ended and results[-1] <= constant[-1]:
            yield Finding(
                name="below_constant",
                severity="error",
                sentence=f"Nothing learned: {measure} is {number(results[-1])} after training, and the best constant "
                f"answer has {number(constant[-1])}.",
                change=_more_signal(evidence),
                metric=measure,
            )
            return


def _held_out(evidence: Evidence) -> Iterator[Finding]:
    """A reward that rises while held-out tasks do not get better."""
    ends, deviation = evidence.reward, evidence.ends("reward/std")
    measure = "eval/pass@1" if evidence.curve("groups/all_right") else "eval/reward/mean"
    results, tasks = evidence.curve(measure), evidence.curve("eval/tasks")
    if ends is None or deviation is None or len(results) < 2 or not evidence.ended or evidence.solved:
        return
    graded = evidence.curve("eval/reward/mean")
    if not evidence.setting("eval.rewards") and graded and graded[-1] - graded[0] > 0.2 * ends.change:
        return  # better by the same rewards, if not yet right
    risen = ends.rose and ends.change > thresholds.RISE.value * max(deviation.first, 1e-9)
    noise = math.sqrt(max(results[-1] * (1 - results[-1]), 0.0) / max(1.0, tasks[-1] if tasks else 1.0))
    if (
        not risen
        or results[-1] - results[0] > min(noise, 0.2 * ends.change)
        or (tasks and tasks[-1] < thresholds.HELD_OUT_TASKS.value)
    ):
        return
    yield Finding(
        name="held_out_flat",
        severity="warning",
        sentence=f"The reward rose ({number(ends.first)} → {number(ends.last)}), and held-out tasks did not get better "
        f"({measure} {number(results[0])} → {number(results[-1])} of {counted(tasks[-1] if tasks else 0, 'task')}).",
        change=Change(
            advice="Read rollouts for what the reward pays, and set eval.rewards to a strict one; with few training "
            "tasks, add tasks."
        ),
        metric=measure,
    )


def _demonstrations(evidence: Evidence) -> Iterator[Finding]:
    """Demonstrations that are not learned."""
    values, ends = evidence.curve("optim/expert_nll"), evidence.ends("optim/expert_nll", evidence.least_steps)
    if ends is None or evidence.curve("reward/mean"):
        return
    first = min(values[0], ends.first)  # a first update that is far too large raises most of the first steps too
    if ends.last - first > max(thresholds.GAIN.value * ends.error, thresholds.DIVERGED.value * abs(first)):
        yield Finding(
            name="demonstrations_diverge",
            severity="error",
            sentence="The negative log-likelihood of the demonstrations rose: "
            f"{number(first)} → {number(ends.last)} nats per token.",
            change=lower_rate(evidence, 10, "Then start again."),
            metric="optim/expert_nll",
        )


def _pairs(evidence: Evidence) -> Iterator[Finding]:
    """Pairs whose order is not learned."""
    pairs = evidence.recent("optim/pairs/accuracy")
    ends = evidence.ends("optim/pairs/accuracy")
    if pairs is not None and pairs <= thresholds.PAIRS.value and ends is not None and not ends.rose:
        yield Finding(
            name="pairs_not_learned",
            severity="warning",
            sentence=f"Only {percent(pairs)} of the pairs are in the right order after "
            f"{counted(ends.count, 'step')}, no more than by chance.",
            change=_more_signal(evidence),
            metric="optim/pairs/accuracy",
        )


def _smoothed(values: Sequence[float]) -> list[float]:
    """Means of as many values as `Ends` compares, that end at each."""
    size = ends_size(len(values))
    return [math.fsum(values[at - size : at]) / size for at in range(size, len(values) + 1)]
