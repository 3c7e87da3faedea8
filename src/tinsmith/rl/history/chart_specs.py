"""The charts of a run: which metrics are in each. The report and the dashboard draw these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinsmith.rl.record.metrics import measures_right


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """Which metrics are in one chart.

    Example: ChartSpec(title="Reward by role", pattern=r"reward/([^/]+)/mean")
    """

    title: str
    pattern: str
    """Regular expression of the whole name of a metric; its group, if there is one, names the curve."""
    limits: tuple[float | None, float | None] = (None, None)
    """Values that the axis includes at least."""
    points: bool = False
    """Whether each value is marked, such as those of evaluations."""
    least: int = 1
    """Fewest metrics that make a chart."""
    needs_right: bool = False
    """Whether it is drawn only where something says what is right."""

    def matches(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """(metric, name of its curve) of the metrics of the chart; none if there are fewer than `least`."""
        matches = [match for name in names if (match := re.fullmatch(self.pattern, name))]
        curves = [(match[0], match[1].replace("/workflow", "") if match.re.groups else match[0]) for match in matches]
        return curves if len(curves) >= self.least else []


SECTIONS: Mapping[str, tuple[ChartSpec, ...]] = {
    "Reward": (
        ChartSpec(title="Reward", pattern="reward/mean", limits=(0, 1)),
        ChartSpec(title="Reward by part", pattern=r"reward/(?!mean$|std$|kl$|kl_coef$)([^/]+)", limits=(0, 1), least=2),
        ChartSpec(title="Reward by role", pattern=r"reward/([^/]+)/mean", limits=(0, 1)),
        ChartSpec(title="Reward by environment", pattern=r"env/([^/]+)/reward/mean", limits=(0, 1)),
        ChartSpec(title="Groups without a signal (share)", pattern="groups/constant", limits=(0, 1)),
    ),
    "Evaluations": (
        ChartSpec(
            title="Held-out accuracy (pass@k)",
            pattern=r"eval/(pass@\d+|constant_pass@1)",
            limits=(0, 1),
            points=True,
            needs_right=True,
        ),
        ChartSpec(title="Held-out reward", pattern=r"eval/(reward/mean|constant_reward)", points=True, limits=(0, 1)),
        ChartSpec(
            title="Held-out accuracy by source",
            pattern=r"eval/([^/]+)/pass@1",
            limits=(0, 1),
            points=True,
            needs_right=True,
        ),
        ChartSpec(
            title="Held-out reward by source",
            pattern=r"eval/(?!reward/)([^/]+)/reward/mean",
            limits=(0, 1),
            points=True,
        ),
        ChartSpec(title="Benchmarks", pattern=r"eval/benchmark/(.+)", points=True, limits=(0, 1)),
        ChartSpec(title="Held-out reward by role", pattern=r"eval/reward/([^/]+)/mean", limits=(0, 1), points=True),
        ChartSpec(title="Skill above trivial answers (1: perfect)", pattern=r"(?:env|workflow)/(.+)/skill"),
        ChartSpec(title="Held-out skill above trivial answers", pattern=r"eval/(.+)/skill", points=True),
    ),
    "Learning": (
        ChartSpec(title="Negative log-likelihood of demonstrations", pattern="optim/expert_nll"),
        ChartSpec(title="Entropy (estimate, nats per token)", pattern="(policy|optim)/entropy", limits=(0, None)),
        ChartSpec(title="KL sampler to trainer", pattern=r"optim/kl_sample_train_(v2|k3)", limits=(0, None)),
        ChartSpec(title="KL to the reference", pattern=r"optim/(kl|kl_reference_k3)", limits=(0, None)),
        ChartSpec(title="Gradient norm before clipping", pattern="optim/grad_norm", limits=(0, None)),
        ChartSpec(title="Loss (sum)", pattern="optim/loss"),
        ChartSpec(title="Ratio trainer / sampler", pattern=r"optim/ratio_(min|mean|max)"),
        ChartSpec(title="Clipped tokens (share)", pattern=r"optim/((?:dual_)?clip_fraction)", limits=(0, None)),
        ChartSpec(title="Learning rate", pattern="optim/lr", limits=(0, None)),
        ChartSpec(
            title="Variance of the returns that the critic explains",
            pattern="critic/explained_variance",
            limits=(None, 1),
        ),
    ),
    "Rollouts": (
        ChartSpec(title="Tokens of a reply (mean)", pattern=r"((?:eval/)?tokens/reply)", limits=(0, None)),
        ChartSpec(title="Replies at a limit (share)", pattern=r"rollouts/(cut|max_\w+|timeout)", limits=(0, 1)),
        ChartSpec(title="Failed rollouts", pattern="rollouts/failed", limits=(0, None)),
        ChartSpec(title="Staleness (steps)", pattern=r"policy/(staleness|staleness_max)", limits=(0, None)),
    ),
    "Time": (
        ChartSpec(title="Seconds of a step", pattern=r"time/(step|rollouts|update)", limits=(0, None)),
        ChartSpec(title="Tokens per second", pattern=r"speed/(\w+)_tokens_per_second", limits=(0, None)),
        ChartSpec(title="Overlap: share of the trainer's work with sampling", pattern="time/overlap", limits=(0, 1)),
    ),
}
"""All charts, by section. One whose metrics no run has is left out."""


def chart_specs(rows: Iterable[Mapping[str, float]]) -> Mapping[str, Sequence[ChartSpec]]:
    """The charts of runs with these rows of metrics, by section: accuracy only where something says what is right."""
    right = measures_right(rows)
    return {section: [spec for spec in specs if right or not spec.needs_right] for section, specs in SECTIONS.items()}
