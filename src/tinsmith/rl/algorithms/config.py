"""Settings of the algorithm: a preset by name, and the parts that the run file overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from tinsmith.rl.algorithms.advantages import AdvantageConfig
from tinsmith.rl.algorithms.advantages.base import Advantage
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage
from tinsmith.rl.algorithms.advantages.per_token import PrimeAdvantage
from tinsmith.rl.algorithms.correction import CorrectionConfig
from tinsmith.rl.algorithms.critic import CriticConfig
from tinsmith.rl.algorithms.grouping import Grouping
from tinsmith.rl.algorithms.losses import LossConfig
from tinsmith.rl.algorithms.losses.base import Aggregate, SamplerRatio
from tinsmith.rl.algorithms.losses.policy_gradient import ImportanceSamplingLoss, PpoLoss
from tinsmith.rl.algorithms.losses.preference import BradleyTerryLoss, PreferenceLoss
from tinsmith.rl.algorithms.losses.supervised import MixChordLoss, MixLoss, SftIsLoss, SftLoss, SftPhiLoss
from tinsmith.rl.algorithms.regularizers import EntropyConfig, KlConfig
from tinsmith.rl.algorithms.user_code import OF_THE_RUN, CustomAlgorithm
from tinsmith.rl.policy.chat import Verdict
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.settings import Needs, Settings

Name = Literal[
    "grpo", "grpo_std", "ppo", "dapo", "reinforceplusplus", "rloo", "opmd", "asymre", "dpo", "ipo", "kto",
    "orpo", "simpo", "bradley_terry", "topr", "cispo", "gspo",
    "sapo", "mix", "mix_chord", "raft", "sppo", "rec", "multi_step_grpo", "gigpo", "on_policy_distill", "jsd",
    "topk_distill",
    "grpo_verl", "sft", "cpt",
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(Name)

PAIRS = ("dpo", "ipo", "kto", "orpo", "simpo", "bradley_terry")
"""Algorithms that train on pairs of replies."""
DATA_ONLY = ("sft", "cpt", *PAIRS)
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
    **{name: _parts("reinforce", name) for name in PAIRS},
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
    "topk_distill": _parts("none", "topk_distill"),
    "sft": _parts("reinforce", "sft"),
    "cpt": _parts("reinforce", "sft"),
}


def preset_with(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a preset with overrides. Keys of a part are merged unless the override has another `type`."""
    return _merged(PRESETS[name], overrides)


def _merged(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    parts = {key: dict(value) if isinstance(value, Mapping) else value for key, value in preset.items()}
    for key, value in overrides.items():
        part = parts.get(key)
        if isinstance(part, dict) and isinstance(value, Mapping) and value.get("type") in (None, part.get("type")):
            value = {**part, **value}
        parts[key] = value
    return parts


_ROLLOUTS = Needs(
    "learns_from",
    ("rollouts", "both"),
    reason="with algorithm.type: {0.type}, which samples no rollouts",
    hint="leave it out",
)


class RoleConfig(Settings):
    """How one role of a workflow learns."""

    advantage: AdvantageConfig | None = None
    """Advantage of this role; not set: that of the algorithm."""
    train: bool = True
    """Train on the turns of this role."""


class AlgorithmConfig(Settings):
    """Advantage, policy loss and terms: loss = sum of w (policy loss + kl.coef k - entropy.coef H) over tokens.

    w is the weight of a token by `aggregate`, k the divergence from the reference and H the entropy.
    """

    type: Name = "grpo"
    """Preset of all keys below; keys set here override it (docs/reference/algorithms.md lists the presets). `custom`,
    with `path` and `args`, is code of your own: it sets `custom`."""
    custom: CustomAlgorithm | None = None
    """Code of your own that returned the keys below, the preset that it changes and sections of the run."""
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    """Advantage: how replies or tokens are compared with a baseline."""
    grouping: Annotated[Grouping, _ROLLOUTS] = "role"
    """Which trajectories of a task are compared: those of one `role` in all its rollouts; the first turns of a role,
    the second ones, and so on, by their own rewards (`turn`); or all those of one `rollout`."""
    turn_discount: Annotated[float, _ROLLOUTS, Needs("grouping", ("turn",))] = Field(default=0.0, ge=0, le=1)
    """Compare turns by their returns r_t + turn_discount r_{t+1} + …, where the reward that no turn was given goes to
    the last turn; 0: by their own rewards."""
    roles: Annotated[dict[str, RoleConfig], _ROLLOUTS] = Field(default_factory=dict)
    """Settings of single roles, by the names that the workflow gives them."""
    loss: LossConfig = Field(default_factory=ImportanceSamplingLoss)
    """Policy loss of a token, from its importance ratio and advantage."""
    aggregate: Aggregate = "token_sum"
    """How token losses add up: a sum (`token_sum`), a mean over all tokens of the step (`token_mean`), or a mean over
    replies of each reply's sum (`seq_mean_token_sum`), mean (`seq_mean_token_mean`), or sum divided by the length of
    the longest reply (`seq_mean_token_sum_norm`). Means cover the whole step, however it is split into requests."""
    kl: KlConfig = KlConfig(type="none")
    """Divergence of the policy from the reference, as a term of the loss."""
    kl_penalty: KlConfig = KlConfig(type="none")
    """Divergence of the sampling policy from the reference, subtracted from the reward at each token."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus, as a term of the loss."""
    reference: Literal["base", "start"] = "base"
    """Model that divergences are measured from: the base model, or the weights of model.load_from (`start`)."""
    teacher: str = ""
    """Teacher of on_policy_distill, jsd and topk_distill: the name of a base model on the server, or a tinker:// path
    to sample from."""
    merge_replies: Annotated[bool, _ROLLOUTS] = True
    """Merge identical replies of a group into one row with the sum of their advantages, if the gradient is the same."""
    refill: Annotated[bool, _ROLLOUTS] = False
    """Replace replies of dropped groups by copies of other replies of the step, drawn at random."""
    mask_truncated: Annotated[bool, _ROLLOUTS] = False
    """Do not train on rollouts with a turn that reached max_tokens; they still count in their group's baseline."""
    old_logprobs: Annotated[Literal["auto", "sampler", "recomputed"], _ROLLOUTS] = "auto"
    """Logprobs q of replies sampled at a temperature other than 1, or with top_p or top_k: those of the `sampler`, or
    those of the same weights at temperature 1, `recomputed` by one more request for each reply. `auto` recomputes them
    where q is compared with the policy (bounded ratios, kl_penalty, distillation); unbounded importance weights need
    the sampler's."""
    correction: Annotated[CorrectionConfig, _ROLLOUTS] = CorrectionConfig()
    """Weights and masks against the difference between the sampling policy and the trained one."""
    critic: CriticConfig | None = None
    """Critic that predicts returns, a second adapter. Required by advantages that read values (gae)."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("type") == "custom":
            own = {key: value for key, value in values.items() if key not in ("type", "path", "args")}
            values = {**own, "custom": {key: values[key] for key in ("path", "args") if key in values}}
        if (custom := values.get("custom")) is not None:
            code = custom if isinstance(custom, CustomAlgorithm) else CustomAlgorithm.model_validate(custom)
            parts = {key: value for key, value in code.parts().items() if key not in OF_THE_RUN}
            kind = str(values.get("type", parts.get("type", "grpo")))
            values = _merged({**preset_with(kind, parts), "type": kind} if kind in NAMES else parts, values)
        if values.get("type", "grpo") not in NAMES:
            return values
        loss = values.get("loss")
        if isinstance(loss, Mapping) and loss.get("type") == "stable_reinforce":
            raise ValueError(
                "loss.type: stable_reinforce has no published formula; set it to ppo, or set correction.mask to token"
            )
        return preset_with(str(values.get("type", "grpo")), values)

    @model_validator(mode="after")
    def _check_parts(self) -> AlgorithmConfig:
        if (self.critic is not None) != ("values" in self.advantage_columns):
            need = "no critic; leave it out" if self.critic else "a critic; set critic: {}"
            raise ValueError(f"advantage {self.advantage.type} needs {need}")
        reads_teacher = "teacher" in self.advantage_columns
        if bool(self.teacher) != (reads_teacher or self.loss.reads_teacher_top):
            need = "no teacher; leave it out" if self.teacher else "a teacher; set it to a model or a tinker:// path"
            reader = f"loss {self.loss.type}" if self.loss.reads_teacher_top else f"advantage {self.advantage.type}"
            raise ValueError(f"{reader} needs {need}")
        if len({(prime.model, prime.reference) for prime in self.primes}) > 1:
            raise ValueError("advantage prime names several models; name the same model and reference for all roles")
        if self.advantage.type == "none" and self.loss.reads_advantage:
            raise ValueError(f"loss {self.loss.type} reads an advantage; set advantage.type to another than none")
        if self.reference == "start" and not (self.loss_reads_reference or self.kl_penalty.enabled):
            raise ValueError("reference: start is not used without a divergence; leave it out, or set kl.coef")
        if self.kl_penalty.enabled and not self.advantage.reads_rewards:
            raise ValueError(
                f"kl_penalty is not used with advantage {self.advantage.type}, which reads no rewards; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> AlgorithmConfig:
        if self.correction.enabled and isinstance(self.loss, PpoLoss) and self.loss.mask_drift is not None:
            raise ValueError(
                "loss.mask_drift is not used with correction, after which no reply drifts; use correction.type: mis"
            )
        return self

    @model_validator(mode="after")
    def _check_keys_of_data_only(self) -> AlgorithmConfig:
        """Refuse keys without effect in a run on demonstrations alone: it has no rewards and no sampled tokens."""
        preset = PRESETS[self.type]
        if self.learns_from not in ("demonstrations", "pairs"):
            return self
        terms = {"advantage": self.advantage.type != preset["advantage"]["type"], "kl_penalty": self.kl_penalty.enabled}
        if self.learns_from == "demonstrations":
            if not isinstance(self.loss, SftLoss | SftIsLoss | SftPhiLoss):
                raise ValueError(
                    f"{self.type} needs a likelihood loss, not {self.loss.type}; choose sft, sft_is or sft_phi"
                )
            terms |= {"kl": self.kl.enabled, "entropy": bool(self.entropy.coef)}
        elif not (self.kl.enabled or self.entropy.coef):
            terms["aggregate"] = self.aggregate != preset["aggregate"]
        if unused := [name for name, present in terms.items() if present]:
            raise ValueError(
                f"{unused[0]} is not used with algorithm.type: {self.type}, which samples no rollouts; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_grouping(self) -> AlgorithmConfig:
        if self.grouping == "rollout" and any(role.advantage for role in self.roles.values()):
            raise ValueError("grouping: rollout compares roles with each other; leave out roles.NAME.advantage")
        if self.grouping == "turn" and (self.critic or any(advantage.reads_states for advantage in self.advantages)):
            raise ValueError(
                f"grouping: turn is not used with advantage {self.advantage.type}, which divides a trajectory into "
                "turns itself; leave it out"
            )
        return self

    @property
    def title(self) -> str:
        """Name of the algorithm, for messages: that of its preset, or of the code of a user."""
        return self.custom.title if self.custom else self.type

    def advantage_of(self, role: str) -> Advantage:
        """The advantage of a role."""
        return (role in self.roles and self.roles[role].advantage) or self.advantage

    def trains(self, role: str) -> bool:
        """Whether to train on the turns of a role."""
        return role not in self.roles or self.roles[role].train

    @property
    def advantages(self) -> tuple[Advantage, ...]:
        """The advantages of all roles."""
        return (self.advantage, *(role.advantage for role in self.roles.values() if role.advantage))

    @property
    def primes(self) -> tuple[PrimeAdvantage, ...]:
        """The advantages that read the rewards of tokens by a reward model."""
        return tuple(advantage for advantage in self.advantages if isinstance(advantage, PrimeAdvantage))

    @property
    def learns_from(self) -> Literal["rollouts", "demonstrations", "pairs", "both"]:
        """What the algorithm trains on: rollouts, demonstrations, pairs of replies (of kto, or replies with labels), or
        rollouts and demonstrations."""
        if isinstance(self.loss, PreferenceLoss):
            return "pairs"
        if isinstance(self.loss, MixLoss | MixChordLoss):
            return "both"
        return "demonstrations" if self.type in ("sft", "cpt") else "rollouts"

    @property
    def reads_mismatched(self) -> bool:
        """Whether the loss reads replies after the prompts of other ones."""
        return isinstance(self.loss, PreferenceLoss) and self.loss.reads_mismatched

    @property
    def reads_labels(self) -> bool:
        """Whether the loss takes replies with labels in place of pairs."""
        return isinstance(self.loss, PreferenceLoss) and self.loss.reads_labels

    @property
    def verdict(self) -> Verdict | None:
        """How the loss scores replies, if it is that of a reward model."""
        loss = self.loss
        return Verdict(loss.question, loss.answer) if isinstance(loss, BradleyTerryLoss) else None

    @property
    def sampler_ratio(self) -> SamplerRatio:
        """How the algorithm reads the sampler's logprobs."""
        if self.kl_penalty.enabled or any(advantage.compares_policy for advantage in self.advantages):
            return "bounded"
        if self.correction.mask != "none":
            return "bounded"
        if self.correction.type == "proximal":
            return "none"
        return "exact" if self.correction.enabled else self.loss.sampler_ratio

    def recomputes(self, sampling: SamplingConfig) -> bool:
        """Whether logprobs of replies sampled with these settings are computed again, at temperature 1."""
        if self.old_logprobs == "auto":
            match self.sampler_ratio:
                case "none":
                    return False
                case "exact":
                    return sampling.restricts
        return self.old_logprobs != "sampler" and (sampling.restricts or sampling.temperature != 1)

    def sampling_fault(self, sampling: SamplingConfig) -> str:
        """Message if importance weights cannot be computed for replies sampled with these settings, else empty."""
        if self.old_logprobs != "auto" or self.sampler_ratio != "exact" or not sampling.restricts:
            return ""
        setting = "temperature 0" if sampling.temperature == 0 else "top_p or top_k"
        return (
            f"sampling with {setting} does not return the probabilities that replies were sampled with, which the "
            f"importance weights of {self.type} need; sample without, or set algorithm.old_logprobs to recomputed to "
            "train on the replies as if they were sampled from the whole distribution at temperature 1"
        )

    @property
    def advantage_columns(self) -> frozenset[str]:
        """Per-token columns that must be there before advantages are computed."""
        penalty = {"reference"} if self.kl_penalty.enabled else set()
        columns = (column for advantage in self.advantages for column in advantage.columns)
        return frozenset({*columns, *penalty})

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the loss reads the reference's logprobs."""
        return self.kl.enabled or self.loss.reads_reference

    @property
    def columns(self) -> frozenset[str]:
        """All per-token columns that advantage or loss read."""
        teacher = {"teacher_top"} if self.loss.reads_teacher_top else set()
        return self.advantage_columns | ({"reference"} if self.loss_reads_reference else set()) | teacher

    @property
    def merges_rows(self) -> bool:
        """Whether identical replies may share a row: the loss is linear in the advantage, which reads no columns."""
        one_kink = self.correction.mask != "token" or self.loss.advantage_kink in (None, 0.0)
        return self.merge_replies and self.loss.linear and one_kink and not self.advantage_columns - {"reference"}

    @property
    def advantage_kink(self) -> float | None:
        """The advantage at which the loss, or the mask of tokens, changes its form; None if it has none."""
        return 0.0 if self.correction.mask == "token" else self.loss.advantage_kink

    @property
    def stream_fault(self) -> str:
        """Message if the gradient of a batch cannot be computed group by group, else empty."""
        aggregates = {"aggregate": self.aggregate}
        if isinstance(self.loss, MixLoss | MixChordLoss):
            aggregates["loss.expert_aggregate"] = self.loss.expert_aggregate or self.aggregate
        if means := [f"{key} {value}" for key, value in aggregates.items() if value != "token_sum"]:
            return (
                f"algorithm.{means[0]} divides by the lengths of the whole batch, which are not known while it "
                "is sampled; set it to token_sum"
            )
        if not all(advantage.of_groups for advantage in self.advantages):
            return (
                f"algorithm.advantage {self.advantage.type} compares a group with the others of the batch; choose one "
                "that compares within the group, such as grpo or rloo"
            )
        if self.kl_penalty.target is not None:
            return "algorithm.kl_penalty.target adapts to the mean of the whole batch; leave it out"
        if self.refill:
            return "algorithm.refill copies replies of the whole batch; leave it out"
        if self.critic is not None:
            return "algorithm.critic learns from the whole batch before the policy does; choose a group advantage"
        return ""

    @property
    def drop_zero_advantage(self) -> bool:
        """Whether rows with zero advantage can be dropped, because they have no gradient."""
        terms = self.kl.enabled or self.entropy.coef or self.critic
        return not (self.loss.has_gradient_without_advantage or terms)
