"""Findings about the policy and its updates: entropy, equal replies, divergences, gradients, the critic, staleness."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import thresholds
from tinsmith.rl.diagnosis.evidence import Evidence, finite
from tinsmith.rl.diagnosis.findings import Change, Finding
from tinsmith.rl.diagnosis.words import RATE, lower_rate, number, percent, rounded

_OF_NO_SIGNAL = ("no_update", "few_updates", "few_signals", "equal_replies_in_groups")
_OF_DAMAGE = (
    *_OF_NO_SIGNAL, "entropy_collapse", "learning_rate_high", "cut_off", "max_turns", "lengths_grow", "lengths_shrink",
    "reward_falls", "far_from_reference",
)  # fmt: skip
"""Findings of a policy that writes no text any more."""
_MORE_ENTROPY = Change(setting="algorithm.entropy.coef", value=0.01)
_NORMS = 8
"""Gradient norms before one can stand out."""


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Findings about the policy and its updates."""
    yield from _not_finite(evidence)
    yield from _equal_replies(evidence)
    yield from _entropy(evidence)
    yield from _learning_rate(evidence)
    yield from _mismatch(evidence)
    yield from _off_policy(evidence)
    yield from _reference(evidence)
    yield from _gradient_spikes(evidence)
    yield from _critic(evidence)


def _not_finite(evidence: Evidence) -> Iterator[Finding]:
    """A loss or a gradient that is not a number. metrics.jsonl has null for it."""
    for name, noun in (("optim/grad_norm", "gradient"), ("optim/loss", "loss")):
        if steps := [row["step"] for row in evidence.trained if name in row and not _is_number(row[name])]:
            yield Finding(
                name="not_finite",
                severity="error",
                sentence=f"The {noun} of {counted(len(steps), 'step')} was not finite, first in step {steps[0]:.0f}.",
                change=lower_rate(evidence, 10, "Start again from a checkpoint before that step."),
                metric=name,
                explains=(*_OF_DAMAGE, "equal_replies", "entropy_explosion"),
            )
            return


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")  # False for NaN


def _equal_replies(evidence: Evidence) -> Iterator[Finding]:
    """One text for different tasks: what a learning rate that is far too high leaves of a policy."""
    if evidence.solved:
        return
    sampled, held_out = evidence.curve("rollouts/equal"), evidence.curve("eval/equal")
    first, last = (sampled[0], evidence.recent("rollouts/equal") or 0.0) if sampled else (0.0, 0.0)
    where, metric = "tasks of the last steps", "rollouts/equal"
    if last < thresholds.EQUAL.value and held_out and held_out[0] < thresholds.EQUAL.value:
        first, last, where, metric = held_out[0], held_out[-1], "held-out tasks", "eval/equal"
    cut = (evidence.recent("rollouts/cut") or 0.0) > thresholds.CUT_AT_FIRST.value
    judged = evidence.converged and bool(evidence.curve("groups/all_right"))
    always = first >= thresholds.EQUAL.value
    if last >= thresholds.EQUAL.value and not judged and not (always and cut):
        same = f"{percent(last)} of the replies to different {where} are the same text"
        before = "from the first on" if always else f"{percent(first)} at first"
        if evidence.improves or always:
            yield Finding(
                name="equal_replies_pay",
                severity="warning",
                sentence=f"{same} ({before}), and the reward pays for it."
                if evidence.improves
                else f"{same} ({before}).",
                change=Change(
                    advice="Use rewards that depend on the task, such as rewards: [{type: math}]."
                    if evidence.improves
                    else "Look at a reply with `tinsmith debug FILE`: the prompt or sampling.stop may leave no other."
                ),
                metric=metric,
                explains=("held_out_flat", *_OF_NO_SIGNAL[1:]),
            )
            return
        yield Finding(
            name="equal_replies",
            severity="error",
            sentence=f"{same} ({before}): the policy has collapsed.",
            change=lower_rate(evidence, 10, "Then start again."),
            metric=metric,
            explains=_OF_DAMAGE,
        )
        return
    groups = evidence.recent("groups/equal")
    if groups is not None and groups >= thresholds.EQUAL_GROUPS.value and not evidence.converged and not cut:
        cold = evidence.number("sampling.temperature", 1.0) < 1
        yield Finding(
            name="equal_replies_in_groups",
            severity="warning",
            sentence=f"In {percent(groups)} of the groups of the last steps all replies are the same text, so there is "
            "nothing to compare.",
            change=Change(setting="sampling.temperature", value=1) if cold else _MORE_ENTROPY,
            metric="groups/equal",
        )


def _entropy(evidence: Evidence) -> Iterator[Finding]:
    """A policy that is sure of replies that are not better, or that writes random tokens."""
    curve, last = evidence.curve(evidence.entropy), evidence.recent(evidence.entropy)
    if last is None or len(curve) < 2 or evidence.solved:
        return
    start = curve[: thresholds.STEPS.count]
    low = last < thresholds.ENTROPY_LOW.value and last < thresholds.ENTROPY_FALL.value * max(start)
    if low and not evidence.converged:
        yield Finding(
            name="entropy_collapse",
            severity="warning",
            sentence=f"The entropy has collapsed ({number(max(start))} → {number(max(0.0, last))} nats per token): the "
            "policy samples nothing else any more.",
            change=_MORE_ENTROPY
            if max(evidence.curve("optim/lr"), default=0.0) <= thresholds.RATE_USUAL.value
            else lower_rate(evidence, 3),
            metric=evidence.entropy,
            explains=("equal_replies_in_groups", "few_signals"),
        )
    elif last - min(start) > thresholds.ENTROPY_RISE.value and not evidence.improves:
        yield Finding(
            name="entropy_explosion",
            severity="error",
            sentence=f"The entropy has grown ({number(min(start))} → {number(last)} nats per token): the replies turn "
            "into random tokens.",
            change=lower_rate(evidence, 10, "Then start again."),
            metric=evidence.entropy,
            explains=_OF_DAMAGE,
        )


def _learning_rate(evidence: Evidence) -> Iterator[Finding]:
    """A learning rate out of the usual range, in a run that does not improve."""
    rates, rewards = evidence.curve("optim/lr"), evidence.curve("reward/mean")
    is_good = evidence.improves or evidence.is_settled or evidence.solved
    rate = max(rates, default=0.0) if evidence.curve("optim/grad_norm") else 0.0  # 0: no update was made
    least = evidence.least_steps if rate >= thresholds.RATE_DESTROYS.value else thresholds.TREND_STEPS.value
    if not rate or is_good or len(rewards) < least:
        return
    if rate < thresholds.RATE_LOW.value:
        yield Finding(
            name="learning_rate_low",
            severity="warning",
            sentence=f"The learning rate is {number(rate)} at most, and the reward has not risen.",
            change=Change(
                setting=RATE, value=0.0001, advice="LoRA needs about ten times the rate of full fine-tuning."
            ),
            metric="optim/lr",
        )
    elif rate > thresholds.RATE_HIGH.value and (evidence.recent("reward/mean") or 0.0) <= max(rewards[:2]):
        yield Finding(
            name="learning_rate_high",
            severity="error",
            sentence=f"The learning rate is {number(rate)}, and the reward has not risen.",
            change=lower_rate(evidence, 10, "Then start again."),
            metric="optim/lr",
            explains=(
                *_OF_NO_SIGNAL,
                "entropy_collapse",
                "reward_falls",
                "lengths_shrink",
                "far_from_reference",
                "cut_off",
            ),
        )


def _mismatch(evidence: Evidence) -> Iterator[Finding]:
    """Without staleness, the sampler and the trainer have the same weights: their logprobs must agree."""
    fresh = [row for row in evidence.trained if not finite(row.get("policy/staleness_max"))]
    value = Evidence(evidence.settings, fresh).recent("optim/kl_sample_train_v2")
    if value is None or value <= thresholds.MISMATCH.value:
        return
    exact = evidence.number("sampling.temperature", 1.0) == 1 and evidence.number("sampling.top_p", 1.0) == 1
    yield Finding(
        name="sampler_mismatch",
        severity="warning",
        sentence=f"Sampler and trainer disagree: optim/kl_sample_train_v2 is {number(value)} although the weights are "
        "the same.",
        change=Change(
            setting="algorithm.correction.type",
            value="tis",
            advice="Another sampler or another precision rounds differently.",
        )
        if exact
        else Change(
            setting="sampling.temperature",
            value=1,
            advice="Leave out top_p and top_k. Or set algorithm.old_logprobs: recomputed.",
        ),
        metric="optim/kl_sample_train_v2",
        explains=("off_policy",) if not _is_stale(evidence) and not _updates_often(evidence) else (),
    )


def _is_stale(evidence: Evidence) -> bool:
    return (evidence.recent("policy/staleness") or 0.0) > 0


def _updates_often(evidence: Evidence) -> bool:
    return evidence.number("updates.epochs", 1) * evidence.number("updates.minibatches", 1) > 1


def _off_policy(evidence: Evidence) -> Iterator[Finding]:
    """Updates on data that the policy in training would hardly sample."""
    bounds = (
        ("optim/ess_tokens", evidence.recent("optim/ess_tokens"), thresholds.EFFECTIVE, False),
        ("optim/kl_sample_train_k3", evidence.recent("optim/kl_sample_train_k3"), thresholds.DIVERGENCE, True),
        ("optim/clip_fraction", evidence.recent("optim/clip_fraction"), thresholds.CLIPPED, True),
        ("optim/ratio_max", _median(evidence.curve("optim/ratio_max")), thresholds.RATIO, True),
    )
    beyond = [
        f"{name} is {number(value)} ({'above' if above else 'below'} {number(bound.value)})"
        for name, value, bound, above in bounds
        if value is not None and (value > bound.value if above else value < bound.value)
    ]
    guarded = [row["step"] for row in evidence.trained if finite(row.get("policy/guarded"))]
    if len(guarded) > thresholds.GUARDED.value * len(evidence.trained) and len(guarded) >= evidence.least_steps:
        beyond.append(f"backoff was in effect in {len(guarded)} of {counted(len(evidence.trained), 'step')}")
    stale, often = _is_stale(evidence), _updates_often(evidence)
    if len(evidence.trained) < evidence.least_steps or not beyond or not (stale or often or len(beyond) > 1):
        return
    yield Finding(
        name="off_policy",
        severity="warning",
        sentence=f"Updates use replies that are too old for the policy: {', '.join(beyond)}.",
        change=_fresher(evidence, stale=stale),
        metric=beyond[0].split(" ")[0] if beyond[0].startswith("optim/") else "policy/guarded",
    )


def _fresher(evidence: Evidence, *, stale: bool) -> Change:
    epochs = int(evidence.number("updates.epochs", 1))
    staleness = int(evidence.number("staleness"))
    if epochs > 1:
        return Change(setting="updates.epochs", value=epochs // 2)
    if evidence.number("updates.minibatches", 1) > 1 and not stale:
        return Change(setting="updates.minibatches", value=int(evidence.number("updates.minibatches")) // 2)
    if staleness:
        return Change(setting="staleness", value=staleness // 2)
    return lower_rate(evidence, 3)


def _reference(evidence: Evidence) -> Iterator[Finding]:
    """A policy far from its reference that is no better for it."""
    value = evidence.recent("optim/kl_reference_k3")
    if value is None or value <= thresholds.REFERENCE.value or evidence.improves or evidence.solved:
        return
    key = "algorithm.kl" if evidence.number("algorithm.kl.coef") else "algorithm.kl_penalty"
    coef = evidence.number(f"{key}.coef", 0.001) or 0.001
    yield Finding(
        name="far_from_reference",
        severity="warning",
        sentence=f"The policy is {number(value)} nats per token from its reference (optim/kl_reference_k3), and the "
        "reward has not risen.",
        change=Change(setting=f"{key}.coef", value=rounded(10 * coef)),
        metric="optim/kl_reference_k3",
        explains=("reward_falls",),
    )


def _gradient_spikes(evidence: Evidence) -> Iterator[Finding]:
    norms = [(int(row["step"]), value) for row in evidence.trained if (value := finite(row.get("optim/grad_norm"))) > 0]
    least = 1e-6 * max((value for _, value in norms), default=0.0)
    norms = [(step, value) for step, value in norms if value > least]  # a policy that is sure has none left
    if len(norms) < _NORMS:
        return
    median = statistics.median(value for _, value in norms)
    clip = evidence.number("optimizer.grad_clip_norm")
    spikes = [(step, value) for step, value in norms if value > thresholds.SPIKE.value * median]
    if not spikes or 0 < clip <= 2 * median:
        return
    step, value = max(spikes, key=lambda spike: spike[1])
    yield Finding(
        name="gradient_spikes",
        severity="warning",
        sentence=f"The gradient norm of {counted(len(spikes), 'step')} is far above the median of {number(median)}: "
        f"{number(value)} in step {step}.",
        change=Change(setting="optimizer.grad_clip_norm", value=rounded(2 * median)),
        metric="optim/grad_norm",
    )


def _critic(evidence: Evidence) -> Iterator[Finding]:
    """A critic whose values say nothing about the returns."""
    explained = evidence.recent("critic/explained_variance")
    warm_up = evidence.number("algorithm.critic.warmup_steps")
    steps = len(evidence.curve("critic/explained_variance"))
    if explained is None or steps < thresholds.TREND_STEPS.value + warm_up or evidence.solved:
        return
    if explained >= thresholds.EXPLAINED.value or (evidence.recent("reward/std") or 0.0) == 0:
        return
    yield Finding(
        name="critic",
        severity="warning",
        sentence=f"The critic does not predict the returns: it explains {percent(max(0.0, explained))} of their "
        f"variance after {counted(steps, 'step')}.",
        change=Change(
            setting="algorithm.critic.optimizer.learning_rate",
            value=_critic_rate(evidence),
            advice="Set low and high of the critic to the range of the returns.",
        ),
        metric="critic/explained_variance",
    )


def _critic_rate(evidence: Evidence) -> float:
    """A higher learning rate for the critic."""
    rate = evidence.number("algorithm.critic.optimizer.learning_rate") or max(evidence.curve("critic/lr"), default=0.0)
    return rounded(max(1e-4, 3 * rate))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
