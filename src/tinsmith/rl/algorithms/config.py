"""The algorithm of a run: a preset by name, and what the run file changes of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from tinsmith.rl.algorithms.advantages import AdvantageConfig
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage
from tinsmith.rl.algorithms.critic import CriticConfig
from tinsmith.rl.algorithms.losses import LossConfig
from tinsmith.rl.algorithms.losses.base import Aggregate
from tinsmith.rl.algorithms.losses.policy_gradient import ImportanceSamplingLoss
from tinsmith.rl.algorithms.losses.preference import DpoLoss
from tinsmith.rl.algorithms.losses.supervised import MixChordLoss, MixLoss, SftIsLoss, SftLoss, SftPhiLoss
from tinsmith.rl.algorithms.regularizers import EntropyConfig, KlConfig
from tinsmith.settings import Needs, Settings

Name = Literal[
    "grpo", "grpo_std", "ppo", "dapo", "reinforceplusplus", "rloo", "opmd", "asymre", "dpo", "topr", "cispo", "gspo",
    "sapo", "mix", "mix_chord", "raft", "sppo", "rec", "multi_step_grpo", "gigpo", "on_policy_distill", "jsd",
    "grpo_verl", "sft", "cpt",
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(Name)

DATA_ONLY = ("sft", "cpt", "dpo")
"""Algorithms that train on demonstrations alone."""

_K2 = {"type": "k2", "coef": 0.001}
_NONE = {"type": "none"}


def _parts(
    advantage: str, loss: str, kl: Mapping[str, Any] = _NONE, aggregate: str = "token_mean", **more: Any
) -> dict[str, Any]:
    shift = {"shift": 0.1} if more.pop("asymmetric", False) else {}
    return {
        "advantage": {"type": advantage, **shift},
        "loss": {"type": loss},
        "kl": dict(kl),
        "aggregate": aggregate,
        **more,
    }


PRESETS: Mapping[str, dict[str, Any]] = {
    "grpo": {
        "advantage": {"type": "grpo", "normalize": "none", "std_threshold": 0.0},
        "loss": {"type": "importance_sampling"},
        "kl": _NONE,
        "aggregate": "token_sum",
    },
    "grpo_std": _parts("grpo", "ppo", _K2),
    "grpo_verl": _parts("grpo", "ppo", _K2),
    "ppo": _parts("gae", "ppo", _K2, critic={}),
    "dapo": _parts("grpo", "ppo"),
    "reinforceplusplus": _parts("reinforceplusplus", "ppo", _K2),
    "rloo": _parts("rloo", "ppo", _K2),
    "opmd": _parts("opmd", "opmd", _K2),
    "asymre": _parts("opmd", "opmd", asymmetric=True),
    "dpo": _parts("reinforce", "dpo"),
    "topr": _parts("reinforce", "topr", _K2),
    "cispo": _parts("grpo", "cispo", _K2),
    "gspo": _parts("grpo", "gspo", _K2, "seq_mean_token_mean"),
    "sapo": _parts("grpo", "sapo", _K2),
    "mix": _parts("grpo", "mix", _K2),
    "mix_chord": _parts("grpo", "mix_chord", _K2),
    "raft": _parts("best", "opmd"),
    "sppo": _parts("opmd", "sppo"),
    "rec": _parts("rec", "rec", _K2),
    "multi_step_grpo": _parts("step_wise_grpo", "ppo", _K2),
    "gigpo": _parts("gigpo", "ppo", _K2),
    "on_policy_distill": _parts("on_policy_distill", "ppo"),
    "jsd": _parts("jsd", "ppo"),
    "sft": _parts("reinforce", "sft"),
    "cpt": _parts("reinforce", "sft"),
}


def filled(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's parts with what was given on top."""
    parts = {key: dict(value) if isinstance(value, Mapping) else value for key, value in PRESETS[name].items()}
    for key, value in given.items():
        under = parts.get(key)
        same = isinstance(value, Mapping) and isinstance(under, dict) and value.get("type") in (None, under.get("type"))
        parts[key] = {**under, **value} if same and isinstance(under, dict) else value
    return parts


_ROLLOUTS = Needs(
    "learns_from",
    ("rollouts", "both"),
    reason="with algorithm.type: {0.type}, which samples no rollouts",
    hint="leave it out",
)


class AlgorithmConfig(Settings):
    """Advantage, policy loss and terms. loss = sum w (policy loss + kl.coef k - entropy.coef H), w by `aggregate`."""

    type: Name = "grpo"
    """A preset for everything below (docs/guides/algorithms.md has the table)."""
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    """How replies are compared."""
    loss: LossConfig = Field(default_factory=ImportanceSamplingLoss)
    """What is made of ratio and advantage at a token."""
    aggregate: Aggregate = "token_sum"
    """How tokens add up: sums, or means over the whole batch, however it is cut for the server."""
    kl: KlConfig = KlConfig(type="none")
    """Divergence from the reference, in the loss."""
    kl_penalty: KlConfig = KlConfig(type="none")
    """Divergence of the sampler's logprobs from the reference, off the reward at each token."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus in the loss."""
    reference: Literal["base", "start"] = "base"
    """Whose logprobs divergences are taken from: the bare base model, or the weights of model.load_from."""
    teacher: str = ""
    """Of advantages that compare with one: a base model by the name that the server has for it, or a tinker:// path."""
    merge_replies: Annotated[bool, _ROLLOUTS] = True
    """Train on equal replies of a group once, with their advantages summed, where that is the same gradient."""
    refill: Annotated[bool, _ROLLOUTS] = False
    """Put copies of kept replies, drawn at random, in the place of those that were dropped."""
    mask_truncated: Annotated[bool, _ROLLOUTS] = False
    """Rollouts with a turn that met max_tokens count in comparisons, and are not learned from."""
    critic: CriticConfig | None = None
    """Critic of an advantage that reads values: a second adapter."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("type", "grpo") not in NAMES:
            return given
        return filled(str(given.get("type", "grpo")), dict(given))

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmConfig:
        if (self.critic is not None) != ("values" in self.advantage_columns):
            cure = "no critic; leave it out" if self.critic else "a critic; give critic: {}"
            raise ValueError(f"advantage {self.advantage.type} wants {cure}")
        if bool(self.teacher) != ("teacher" in self.advantage_columns):
            cure = "no teacher; leave it out" if self.teacher else "a teacher: the name of a base model, or a path"
            raise ValueError(f"advantage {self.advantage.type} wants {cure}")
        if self.reference == "start" and not (self.loss_reads_reference or self.kl_penalty.enabled):
            raise ValueError("nothing reads a reference here; leave out reference: start, or set kl.coef")
        if self.kl_penalty.enabled and not self.advantage.reads_rewards:
            raise ValueError(
                f"advantage {self.advantage.type} reads no rewards, so kl_penalty does nothing; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _lessons_read_it(self) -> AlgorithmConfig:
        """Of data to learn from as it stands, there are no rewards to compare and no words of the policy's own."""
        usual = PRESETS[self.type]
        if self.learns_from not in ("demonstrations", "pairs"):
            return self
        terms = {"advantage": self.advantage.type != usual["advantage"]["type"], "kl_penalty": self.kl_penalty.enabled}
        if self.learns_from == "demonstrations":
            if not isinstance(self.loss, SftLoss | SftIsLoss | SftPhiLoss):
                raise ValueError(
                    f"{self.type} wants a loss of likelihoods: sft, sft_is or sft_phi, not {self.loss.type}"
                )
            terms |= {"kl": self.kl.enabled, "entropy": bool(self.entropy.coef)}
        elif not (self.kl.enabled or self.entropy.coef):
            terms["aggregate"] = self.aggregate != usual["aggregate"]
        if unused := [name for name, given in terms.items() if given]:
            raise ValueError(
                f"{unused[0]} is not used with algorithm.type: {self.type}, which samples no rollouts; leave it out"
            )
        return self

    @property
    def learns_from(self) -> Literal["rollouts", "demonstrations", "pairs", "both"]:
        """Rollouts; demonstrations; pairs of replies; or rollouts and demonstrations."""
        if isinstance(self.loss, DpoLoss):
            return "pairs"
        if isinstance(self.loss, MixLoss | MixChordLoss):
            return "both"
        return "demonstrations" if self.type in ("sft", "cpt") else "rollouts"

    @property
    def advantage_columns(self) -> frozenset[str]:
        """Columns to request before advantages are computed."""
        penalty = {"reference"} if self.kl_penalty.enabled else set()
        return frozenset({*self.advantage.columns, *penalty})

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the loss compares with the reference's logprobs."""
        return self.kl.enabled or self.loss.reads_reference

    @property
    def columns(self) -> frozenset[str]:
        """Every column to request."""
        return self.advantage_columns | ({"reference"} if self.loss_reads_reference else set())

    @property
    def merges_rows(self) -> bool:
        """Whether identical replies may share a row: the loss is linear in the advantage, which uses no columns."""
        return self.merge_replies and self.loss.linear and not self.advantage_columns - {"reference"}

    @property
    def drop_zero_advantage(self) -> bool:
        """Whether rows without any advantage can be dropped: they have no gradient."""
        return self.loss.reads_advantage and not (self.kl.enabled or self.entropy.coef or self.critic)
