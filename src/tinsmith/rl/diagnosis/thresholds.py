"""The bounds of all rules, each with its reason. docs/not-learning.md shows this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """A bound of a rule.

    Example: Threshold(0.2, "above it, rewards mostly read unfinished text")
    """

    value: float
    """The bound."""
    reason: str
    """Why it is where it is."""

    @property
    def count(self) -> int:
        """The bound as a number of steps or tasks."""
        return int(self.value)


STEPS = Threshold(5, "steps before a rule about single steps speaks, or all of a shorter run: a few may be chance")
TREND_STEPS = Threshold(12, "steps before a rule about trends speaks: below, first and last steps overlap")
UPDATED = Threshold(0.5, "share of steps that update: below half, most sampling is wasted")
CONSTANT = Threshold(0.8, "share of groups with one reward: above, fewer than one group in five has a signal")
SOLVED = Threshold(0.9, "share of right replies from which a missing signal means that the tasks are solved")
FAILED = Threshold(0.05, "share of failed rollouts: single timeouts stay below")
CUT = Threshold(0.2, "share of replies cut off: above, rewards mostly read unfinished text")
CUT_AT_FIRST = Threshold(0.5, "the same in the first batch, which training may still mend: the console notes it")
EQUAL = Threshold(0.9, "share of replies with one text over different tasks: the task no longer matters")
EQUAL_GROUPS = Threshold(0.8, "share of groups whose replies have one text: they have nothing to compare")
ENTROPY_LOW = Threshold(0.05, "nats per token: the most likely token has about 99 %")
ENTROPY_FALL = Threshold(0.2, "share of its first value: a policy that was sure from the start has not collapsed")
ENTROPY_RISE = Threshold(2.0, "nats per token above the first value: replies become random tokens")
MISMATCH = Threshold(0.03, "optim/kl_sample_train_v2 without staleness: bfloat16 stays below, float32 far below")
DIVERGENCE = Threshold(0.05, "optim/kl_sample_train_k3, in nats per token: the bound of backoff")
EFFECTIVE = Threshold(0.3, "optim/ess_tokens: the bound of backoff; below, few tokens determine the gradient")
CLIPPED = Threshold(0.2, "optim/clip_fraction: above, the update is larger than the loss allows for")
RATIO = Threshold(10.0, "optim/ratio_max in most steps: single tokens outweigh ten others")
GUARDED = Threshold(0.2, "share of steps in which backoff is in effect")
REFERENCE = Threshold(
    1.0, "KL to the reference in nats per token, where the reward did not rise: the policy has drifted"
)
DIVERGED = Threshold(
    0.2, "rise of optim/expert_nll as a share of its first: less may be longer or harder demonstrations"
)
PAIRS = Threshold(0.5, "share of pairs in the right order: chance")
SPIKE = Threshold(20.0, "gradient norm relative to its median: Adam does not repair such a step in the next ones")
EXPLAINED = Threshold(0.1, "critic/explained_variance after warm-up: below, advantages are those of no critic")
LENGTH = Threshold(3.0, "length of replies relative to the first steps, where the reward did not rise")
LENGTH_FALL = Threshold(0.1, "the same for replies that shrink")
RATE_LOW = Threshold(1e-5, "learning rate: LoRA needs about ten times that of full fine-tuning, 1e-4 or more")
RATE_USUAL = Threshold(
    3e-4, "learning rate up to which a policy that is too sure needs an entropy bonus, not a lower rate"
)
RATE_HIGH = Threshold(5e-3, "learning rate of Adam with LoRA: above, a few steps can destroy the policy")
RATE_DESTROYS = Threshold(1.0, "learning rate of which a few steps show what it does: one can make every reply garbage")
GAIN = Threshold(2.0, "standard errors between the first and the last steps: smaller changes are noise")
RISE = Threshold(0.1, "rise of the reward, in standard deviations of single rewards, that held-out tasks should show")
FALL = Threshold(0.3, "fall of the reward from its best, as a share of its range: more than noise of a few steps")
HELD_OUT_TASKS = Threshold(16, "held-out tasks: with fewer, a result that does not change may be chance")
END = Threshold(0.9, "share of the steps after which a result is final: earlier, training may still raise it")
