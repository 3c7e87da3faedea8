"""Each advantage equals its formula, written out in plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.advantages.base import Trace, trace_from_trajectory, whiten
from tinsmith.rl.algorithms.advantages.batch import PrpoAdvantage, ReinforcePlusPlusBaselineAdvantage
from tinsmith.rl.algorithms.advantages.group import (
    BestAdvantage,
    ClipBAdvantage,
    GrpoAdvantage,
    OpmdAdvantage,
    RecAdvantage,
    ReinforceAdvantage,
    RlooAdvantage,
)
from tinsmith.rl.algorithms.advantages.multi_turn import GigpoAdvantage, StepWiseGrpoAdvantage
from tinsmith.rl.algorithms.advantages.per_token import (
    GaeAdvantage,
    JsdAdvantage,
    OnPolicyDistillAdvantage,
    PrimeAdvantage,
    ReinforcePlusPlusAdvantage,
)
from tinsmith.rl.types import Trajectory, Turn

NUMBERS = st.floats(-3, 3).map(lambda value: round(value, 3))
GROUPS = st.lists(st.lists(NUMBERS, min_size=1, max_size=6), min_size=1, max_size=4)


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def trace(reward: float, length: int = 2, **more) -> Trace:
    """A trace of `length` tokens with one turn, unless `turns` is set."""
    logprobs = more.pop("logprobs", -np.linspace(0.1, 1.0, length))
    return Trace(reward=reward, logprobs=np.asarray(logprobs, float), turns=more.pop("turns", (length,)), **more)


def firsts(advantage, groups, **more) -> list[list[float]]:
    """The advantage of each reply. Asserts that all tokens of a reply share it."""
    traces = [[trace(reward, 1 + at % 3, **more) for at, reward in enumerate(rewards)] for rewards in groups]
    advantages = advantage.compute(traces, random())
    for advantages_G, traces_G in zip(advantages, traces, strict=True):
        for values, reply in zip(advantages_G, traces_G, strict=False):
            assert len(values) == reply.length
            assert len(set(values.tolist())) == 1
    return [[float(values[0]) for values in advantages_G] for advantages_G in advantages]


def flat(groups) -> list[float]:
    return [value for group in groups for value in group]


@given(GROUPS)
def test_grpo_equals_its_formula(groups):
    expected = []
    for rewards in groups:
        mean = statistics.mean(rewards) if len(rewards) > 1 else 0.0
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 1.0
        expected += [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    assert flat(firsts(GrpoAdvantage(), groups)) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    plain = [reward - (statistics.mean(group) if len(group) > 1 else 0.0) for group in groups for reward in group]
    assert flat(firsts(GrpoAdvantage(normalize="none"), groups)) == pytest.approx(plain, abs=1e-9)


def test_grpo_normalizes_by_the_deviation_of_the_batch():
    groups = [[1.0, 0.0], [5.0, 3.0]]
    scale = statistics.stdev([1.0, 0.0, 5.0, 3.0]) + 1e-6
    assert flat(firsts(GrpoAdvantage(normalize="batch"), groups)) == pytest.approx(
        [v / scale for v in (0.5, -0.5, 1, -1)]
    )


@given(GROUPS)
def test_population_deviation_divides_by_n(groups):
    expected, bare = [], []
    for rewards in groups:
        mean = statistics.mean(rewards) if len(rewards) > 1 else 0.0
        deviation = statistics.pstdev(rewards) if len(rewards) > 1 else 1.0
        expected += [(reward - mean) / (deviation + 1e-6) for reward in rewards]
        bare += [(reward - mean) / (deviation if deviation > 1e-8 else 1.0) for reward in rewards]
    values = flat(firsts(GrpoAdvantage(std="population"), groups))
    assert values == pytest.approx(expected, rel=1e-9, abs=1e-9)
    values = flat(firsts(GrpoAdvantage(std="population", epsilon=0.0), groups))
    assert values == pytest.approx(bare, rel=1e-9, abs=1e-9)
    whole = StepWiseGrpoAdvantage(std="population")
    assert flat(firsts(whole, groups)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_population_deviation_of_three_rewards_by_hand():
    ((first, second, third),) = firsts(GrpoAdvantage(std="population", epsilon=0.0), [[0.0, 0.0, 3.0]])
    assert (first, second, third) == pytest.approx((-(0.5**0.5), -(0.5**0.5), 2**0.5))
    with pytest.raises(ValueError, match="std is not used with normalize: none"):
        GrpoAdvantage(normalize="none", std="population")


@given(GROUPS)
def test_advantages_over_the_step_equal_their_formulas(groups):
    centred = [reward - statistics.mean(group) for group in groups for reward in group]
    scale = statistics.pstdev(centred) + 1e-6
    values = flat(firsts(ReinforcePlusPlusBaselineAdvantage(), groups))
    assert values == pytest.approx([value / scale for value in centred], rel=1e-6, abs=1e-6)
    every = flat(groups)
    scale = statistics.pstdev(every) + 1e-6
    values = flat(firsts(PrpoAdvantage(), groups))
    assert values == pytest.approx([(value - statistics.mean(every)) / scale for value in every], rel=1e-6, abs=1e-6)


def test_advantages_over_the_step_by_hand():
    groups = [[1.0, 0.0], [2.0], [4.0, 4.0]]
    assert flat(firsts(ReinforcePlusPlusBaselineAdvantage(), groups)) == pytest.approx(
        [0.5 / 0.1**0.5, -0.5 / 0.1**0.5, 0, 0, 0], rel=1e-5
    )
    deviation = ((1.2**2 + 2.2**2 + 0.2**2 + 2 * 1.8**2) / 5) ** 0.5
    expected = [difference / deviation for difference in (-1.2, -2.2, -0.2, 1.8, 1.8)]
    assert flat(firsts(PrpoAdvantage(), groups)) == pytest.approx(expected, rel=1e-5)
    assert firsts(PrpoAdvantage(), []) == firsts(ReinforcePlusPlusBaselineAdvantage(), []) == []


def test_std_threshold_drops_groups_of_small_deviation():
    groups = [[1.0, 1.0], [2.0], [1.0, 0.0]]
    assert firsts(GrpoAdvantage(std_threshold=0.0), groups)[:2] == [[], []]
    assert firsts(GrpoAdvantage(), groups)[0] == [0.0, 0.0]
    assert firsts(GrpoAdvantage(std_threshold=0.8), groups)[2] == []


def test_rank_penalty_changes_baseline_but_not_reward():
    likely, unlikely = trace(1.0, logprobs=[-0.1]), trace(1.0, logprobs=[-2.0])
    ((first, second),) = GrpoAdvantage(rank_penalty=0.5).compute([[likely, unlikely]], random())
    compared = [1.0 * (1 - 0.5 * 1 / 2), 1.0]  # the unlikely one has rank 0
    expected = (1.0 - statistics.mean(compared)) / (statistics.stdev(compared) + 1e-6)
    assert first[0] == second[0] == pytest.approx(expected)


@given(GROUPS, st.floats(0.2, 3))
def test_opmd_equals_its_formula(groups, tau):
    means = [r - (statistics.mean(g) if len(g) > 1 else 0.0) for g in groups for r in g]
    assert flat(firsts(OpmdAdvantage(), groups)) == pytest.approx(means, abs=1e-9)
    shifted = [r - (statistics.mean(g) - 0.1 if len(g) > 1 else 0.0) for g in groups for r in g]
    assert flat(firsts(OpmdAdvantage(shift=0.1), groups)) == pytest.approx(shifted, abs=1e-9)
    expected = []
    for group in groups:
        b = tau * (math.log(sum(math.exp(r / tau) for r in group)) - math.log(len(group))) if len(group) > 1 else 0.0
        expected += [r - b for r in group]
    assert flat(firsts(OpmdAdvantage(baseline="logavgexp", tau=tau), groups)) == pytest.approx(expected, abs=1e-6)


@given(GROUPS)
def test_rloo_baseline_is_the_mean_of_the_other_rewards(groups):
    expected = []
    for group in groups:
        for at, reward in enumerate(group):
            others = group[:at] + group[at + 1 :]
            expected.append(reward - (statistics.mean(others) if others else 0.0))
    assert flat(firsts(RlooAdvantage(), groups)) == pytest.approx(expected, abs=1e-9)
    assert flat(firsts(ReinforceAdvantage(), groups)) == flat(groups)


def test_rec_balances_rollouts_below_and_above_the_mean():
    ((*values,),) = firsts(RecAdvantage(drop="balance"), [[4.0, 0.0, 0.0, 0.0, 0.0]])
    remaining = [0.0, 4.0]
    assert values[0] == 4.0 - statistics.mean(remaining)
    assert sorted(values[1:]) == [-2.0, 0.0, 0.0, 0.0]
    ((a, b),) = firsts(RecAdvantage(normalize=True), [[1.0, 0.0]])
    assert (a, b) == pytest.approx((1.0, -1.0), abs=1e-5)


def test_best_selects_one_reply_of_each_group():
    ((*values,), dropped) = BestAdvantage().compute([[trace(0.0), trace(2.0), trace(2.0)], [trace(0.0)]], random())
    assert [value.tolist() for value in values] == [[], [1.0, 1.0], []]
    assert dropped == []


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 5)), min_size=2, max_size=6), st.floats(0.5, 1))
def test_reinforce_plus_plus_whitens_returns_over_the_step(replies, gamma):
    returns = [[gamma ** (length - 1 - at) * reward for at in range(length)] for reward, length in replies]
    every = [value for reply in returns for value in reply]
    mean, scale = statistics.mean(every), 1 / math.sqrt(statistics.variance(every) + 1e-8)
    (advantages,) = ReinforcePlusPlusAdvantage(gamma=gamma).compute(
        [[trace(reward, length) for reward, length in replies]], random()
    )
    for values, expected in zip(advantages, returns, strict=True):
        assert values.tolist() == pytest.approx([(value - mean) * scale for value in expected], rel=1e-6, abs=1e-6)


@given(st.lists(NUMBERS, min_size=1, max_size=6), NUMBERS, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_double_sum(values, reward, gamma, lam):
    length = len(values)
    reply = trace(reward, length, columns={"values": np.array(values)})
    rewards = [0.0] * (length - 1) + [reward]
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(length)]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
    ((advantages,),) = GaeAdvantage(gamma=gamma, lam=lam, whiten=False).compute([[reply]], random())
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)


def test_gae_of_a_perfect_critic_is_zero_until_whitened():
    perfect = trace(1.0, 3, columns={"values": np.ones(3)})
    ((advantages,),) = GaeAdvantage(whiten=False).compute([[perfect]], random())
    assert advantages.tolist() == pytest.approx([0, 0, 0])
    whitened = GaeAdvantage().compute([[perfect, trace(0.0, 3, columns={"values": np.ones(3)})]], random())
    every = np.concatenate(whitened[0])
    assert every.mean() == pytest.approx(0, abs=1e-12)
    assert every.std(ddof=1) == pytest.approx(1, rel=1e-6)


def test_token_rewards_hold_turn_rewards_and_penalties():
    reply = trace(1.0, 4, turns=(2, 2), turn_rewards=(0.25, None), penalty=np.full(4, 0.1))
    assert reply.token_rewards.tolist() == pytest.approx([-0.1, 0.15, -0.1, 0.65])
    assert reply.net_reward == pytest.approx(0.6)


def test_step_wise_grpo_optionally_divides_by_turns():
    traces = [trace(1.0, 4, turns=(2, 2)), trace(0.0, 2, turns=(2,))]
    plain, by_turns = (
        StepWiseGrpoAdvantage().compute([traces], random()),
        StepWiseGrpoAdvantage(by_turns=True).compute([traces], random()),
    )
    assert plain[0][0].tolist() == GrpoAdvantage().compute([traces], random())[0][0].tolist()
    assert by_turns[0][0].tolist() == (plain[0][0] / 2).tolist()
    assert by_turns[0][1].tolist() == plain[0][1].tolist()


def test_gigpo_adds_the_advantage_of_a_turn_in_its_state():
    first = trace(2.0, 3, turns=(1, 2), turn_rewards=(0.0, 2.0), states=("a", "b"))
    second = trace(1.0, 2, turns=(1, 1), turn_rewards=(1.0, 0.0), states=("a", "c"))
    (advantages,) = GigpoAdvantage(gamma=0.5, omega=2.0).compute([[first, second]], random())
    returns_a = [0.0 + 0.5 * 2.0, 1.0]
    step = returns_a[0] - statistics.mean(returns_a)
    assert advantages[0].tolist() == pytest.approx([0.5 + 2 * step, 0.5, 0.5])
    assert advantages[1].tolist() == pytest.approx([-0.5 - 2 * step, -0.5])
    with pytest.raises(ConfigError, match="a turn of this workflow has no state"):
        GigpoAdvantage().compute([[trace(1.0)]], random())


def test_gigpo_compares_states_of_one_task_only():
    def pair(first: float, second: float) -> list[Trace]:
        return [trace(reward, 1, turn_rewards=(reward,), states=("start",)) for reward in (first, second)]

    tasks = [pair(1.0, 0.0), pair(9.0, 5.0)]
    together = GigpoAdvantage().compute(tasks, random())
    alone = [GigpoAdvantage().compute([traces], random())[0] for traces in tasks]
    assert [[value.tolist() for value in values] for values in together] == [
        [value.tolist() for value in values] for values in alone
    ]
    assert [float(value[0]) for value in together[1]] == [4.0, -4.0]  # 2 as a rollout, and 2 as a turn


def test_gigpo_credits_the_remaining_reward_to_the_last_turn():
    def returns(reward: float, *turn_rewards: float | None) -> list[float]:
        rewarded = trace(reward, 3, turns=(1, 1, 1), turn_rewards=turn_rewards, states=("a", "b", "c"))
        idle = trace(0.0, 3, turns=(1, 1, 1), turn_rewards=(0.0, 0.0, 0.0), states=("a", "b", "c"))
        (advantages,) = GigpoAdvantage(gamma=0.5).compute([[rewarded, idle]], random())
        return [2 * (value - (reward - 0.0) / 2) for value in advantages[0]]

    assert returns(4.0, None, None, None) == pytest.approx([1.0, 2.0, 4.0])
    assert returns(4.0, 1.0, None, 2.0) == pytest.approx([1.75, 1.5, 3.0])
    assert returns(3.0, 1.0, None, 2.0) == pytest.approx([1.5, 1.0, 2.0])


@given(st.lists(st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01)), min_size=1, max_size=5), st.floats(0.05, 0.95))
def test_distillation_advantages_compare_with_the_teacher(pairs, b):
    student, teacher = np.array([s for s, _ in pairs]), np.array([t for _, t in pairs])
    reply = trace(9.0, len(pairs), logprobs=student, columns={"teacher": teacher})
    ((advantages,),) = OnPolicyDistillAdvantage(coef=0.5).compute([[reply]], random())
    assert advantages.tolist() == pytest.approx((0.5 * (teacher - student)).tolist())
    ((sums,),) = OnPolicyDistillAdvantage(discount=0.9, low=-1.0, high=0.5).compute([[reply]], random())
    for at, value in enumerate(sums):
        later = sum(0.9 ** (k - at) * (teacher[k] - student[k]) for k in range(at, len(pairs)))
        assert value == pytest.approx(min(max(later, -1.0), 0.5))
    ((advantages,),) = JsdAdvantage(beta=b).compute([[reply]], random())
    for s, t, value in zip(student, teacher, advantages, strict=True):
        m = math.log((1 - b) * math.exp(s) + b * math.exp(t))
        assert value == pytest.approx(-(b * (t - m) + (1 - b) * (s - m)), abs=1e-9)
    cool = trace(9.0, len(pairs), logprobs=student / 0.5, columns={"teacher": teacher / 0.5})
    tempered = JsdAdvantage(beta=b, temperature=0.5).compute([[reply]], random())[0][0]
    assert tempered.tolist() == JsdAdvantage(beta=b).compute([[cool]], random())[0][0].tolist()
    ((low,),) = JsdAdvantage(beta=0).compute([[reply]], random())
    ((high,),) = JsdAdvantage(beta=1).compute([[reply]], random())
    assert low.tolist() == pytest.approx((teacher - student).tolist())
    assert high.tolist() == pytest.approx((student - teacher).tolist())


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-2, 2)), min_size=1, max_size=5), st.floats(0, 1))
def test_prime_equals_the_formula_of_the_paper(replies, gamma):
    """A_t = sum of gamma^(s-t) (r_s - mean over the others of their mean r) + R - mean over the others of R."""
    scores = np.random.default_rng(len(replies))
    columns = [{"process": scores.normal(size=n), "process_reference": scores.normal(size=n)} for n, _ in replies]
    traces = [trace(R, n, columns=of) for (n, R), of in zip(replies, columns, strict=True)]
    (advantages,) = PrimeAdvantage(model="tinker://dpo", beta=0.3, gamma=gamma).compute([traces], random())
    r = [0.3 * (of["process"] - of["process_reference"]) for of in columns]
    for i, (n, R) in enumerate(replies):
        others = [j for j in range(len(replies)) if j != i]
        b = sum(r[j].mean() if len(r[j]) else 0.0 for j in others) / max(1, len(others))
        B = sum(replies[j][1] for j in others) / max(1, len(others))
        expected = [sum(gamma ** (s - t) * (r[i][s] - b) for s in range(t, n)) + R - B for t in range(n)]
        assert advantages[i].tolist() == pytest.approx(expected, abs=1e-9)


def test_clip_b_zeroes_tokens_that_reduce_entropy():
    columns = {"entropy": np.array([0.1, 3.0])}
    good, bad = (
        trace(1.0, 2, logprobs=[-0.1, -0.1], columns=columns),
        trace(0.0, 2, logprobs=[-0.1, -3], columns=columns),
    )
    ((positive, negative),) = ClipBAdvantage(mu=0.0).compute([[good, bad]], random())
    signals = [math.exp(p) * (h + p) for p, h in ((-0.1, 0.1), (-0.1, 3.0), (-0.1, 0.1), (-3, 3.0))]
    floor = statistics.mean(signals)
    assert (positive > 0).all()
    assert [value == 0 for value in negative] == [signal < floor for signal in signals[2:]]


def test_trace_holds_only_tokens_of_the_policy():
    turns = (
        Turn(prompt=(1,), tokens=(2, 3), logprobs=(-0.5, -0.25), text="", stop="stop", reward=0.5, state="s"),
        Turn(prompt=(1, 2, 3), tokens=(4,), logprobs=(-1.0,), text="", stop="stop", model="big"),
    )
    trace = trace_from_trajectory(Trajectory(turns=turns, reward=2.0))
    assert (trace.reward, trace.turns, trace.turn_rewards, trace.states) == (2.0, (2,), (0.5,), ("s",))
    assert trace.logprobs.tolist() == [-0.5, -0.25]
    assert trace.token_rewards.tolist() == [0.0, 2.0]


def test_whitening_leaves_fewer_than_two_values_unchanged():
    assert whiten([]) == []
    assert [values.tolist() for values in whiten([np.array([3.0])])] == [[3.0]]
