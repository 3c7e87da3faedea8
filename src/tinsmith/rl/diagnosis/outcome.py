"""Findings about what comes out: rewards, held-out tasks, lengths, and rollouts that fail or are cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import thresholds
from tinsmith.rl.diagnosis.evidence import Evidence, ends_size, finite
from tinsmith.rl.diagnosis.findings import Finding
from tinsmith.rl.diagnosis.words import lower_rate, number, percent, rounded, up


def findings(evidence: Evidence, *, damaged: bool = False) -> Iterator[Finding]:
    """Findings about the outcome. `damaged`: the policy writes no text any more, which explains most of them."""
    yield from _failed(evidence)
    if not damaged:
        yield from _cut_off(evidence)
        yield from _lengths(evidence)
        yield from _reward(evidence)
    yield from _below_constant(evidence, damaged=damaged)
    yield from _held_out(evidence)
    yield from _demonstrations(evidence)


def _failed(evidence: Evidence) -> Iterator[Finding]:
    sampled = [row for row in evidence.steps if "rollouts/failed" in row]
    size = evidence.number("groups_per_step", 1) * evidence.number("group_size", 1)
    failed = sum(finite(row["rollouts/failed"]) for row in sampled)
    share = failed / (size * len(sampled)) if sampled else 0.0
    if share > thresholds.FAILED.value and len(sampled) >= evidence.least_steps:
        yield Finding(
            name="failing_rollouts",
            severity="error" if share > thresholds.UPDATED.value else "warning",
            sentence=f"{counted(int(failed), 'rollout')} failed, {percent(min(1.0, share))} of all.",
            change="Fix the cause: `tinsmith log RUN --level WARNING` shows the first error of each step.",
            metric="rollouts/failed",
        )
    tasks = evidence.curve("eval/tasks")
    lost = sum(evidence.curve("eval/failed")) / (sum(tasks) or 1.0) / evidence.number("eval.num_samples", 1)
    if lost > thresholds.FAILED.value:
        yield Finding(
            name="failing_evaluations",
            severity="warning",
            sentence=f"{percent(min(1.0, lost))} of the answers of evaluations failed, and count as wrong.",
            change="Fix the cause: `tinsmith log RUN` shows their errors.",
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
            change=f"Set sampling.max_tokens: {up(2 * max(1.0, limit))}." if not rise else _overlong(limit),
            metric="rollouts/cut",
        )
    turns = evidence.recent("rollouts/max_turns")
    if turns is not None and turns > thresholds.CUT.value:
        yield Finding(
            name="max_turns",
            severity="warning",
            sentence=f"{percent(turns)} of the rollouts end at the largest number of turns, not by themselves.",
            change="Raise workflow.max_turns.",
            metric="rollouts/max_turns",
        )


def _overlong(limit: float) -> str:
    return f"Add {{type: overlong, max_tokens: {limit:.0f}, margin: {max(1.0, limit / 4):.0f}}} to rewards."


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
            change=f"{lower_rate(evidence, 3)} Continue from a checkpoint near step {step}.",
            metric="reward/mean",
        )
    elif evidence.ended and not ends.rose and not _near_top(evidence):
        yield Finding(
            name="reward_flat",
            severity="warning",
            sentence=f"The reward has not risen in {counted(ends.count, 'step')}: {number(ends.first)} → "
            f"{number(ends.last)}, within noise.",
            change=_more_signal(evidence),
            metric="reward/mean",
        )


def _near_top(evidence: Evidence) -> bool:
    """Whether rewards hardly vary any more, above 0: there is little left to gain."""
    deviation, mean = evidence.recent("reward/std"), evidence.recent("reward/mean")
    return deviation is not None and mean is not None and deviation < 0.1 * abs(mean) and mean > 0


def _more_signal(evidence: Evidence) -> str:
    rate = max(evidence.curve("optim/lr"), default=0.0)
    if 0 < rate < 1e-4:
        return f"Set optimizer.learning_rate: {rounded(3 * rate)}."
    return f"Set groups_per_step: {int(2 * evidence.number('groups_per_step', 16))}, and more steps."


def _below_constant(evidence: Evidence, *, damaged: bool) -> Iterator[Finding]:
    """A policy that one fixed answer would beat."""
    for measure, baseline in (("eval/pass@1", "eval/constant_pass@1"), ("eval/reward/mean", "eval/constant_reward")):
        results, constant = evidence.curve(measure), evidence.curve(baseline)
        if len(results) > 1 and constant and evidence.ended and results[-1] <= constant[-1]:
            yield Finding(
                name="below_constant",
                severity="error",
                sentence=f"Nothing learned: {measure} is {number(results[-1])} after training, and the best constant "
                f"answer has {number(constant[-1])}.",
                change=f"{lower_rate(evidence, 10)} Then start again." if damaged else _more_signal(evidence),
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
        change="Read rollouts for what the reward pays, and set eval.rewards to a strict one; with few training tasks, "
        "add tasks.",
        metric=measure,
    )


def _demonstrations(evidence: Evidence) -> Iterator[Finding]:
    """Demonstrations that are not learned."""
    ends = evidence.ends("optim/expert_nll")
    if ends is not None and ends.rose and not evidence.curve("reward/mean"):
        yield Finding(
            name="demonstrations_diverge",
            severity="error",
            sentence="The negative log-likelihood of the demonstrations rose: "
            f"{number(ends.first)} → {number(ends.last)} nats per token.",
            change=lower_rate(evidence, 10),
            metric="optim/expert_nll",
        )
    pairs = evidence.recent("optim/pairs/accuracy")
    if pairs is not None and pairs <= 0.5 and len(evidence.trained) >= thresholds.TREND_STEPS.value:
        yield Finding(
            name="pairs_not_learned",
            severity="warning",
            sentence=f"Only {percent(pairs)} of the pairs are in the right order, as by chance.",
            change=_more_signal(evidence),
            metric="optim/pairs/accuracy",
        )


def _smoothed(values: Sequence[float]) -> list[float]:
    """Means of as many values as `Ends` compares, that end at each."""
    size = ends_size(len(values))
    return [math.fsum(values[at - size : at]) / size for at in range(size, len(values) + 1)]
