"""`tinsmith eval` of a run, of a stage, on rows of a file, on a run file and on environments of installed packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinsmith.cli.eval.command import evaluate
from tinsmith.cli.eval.tasks import is_own, own_config, title
from tinsmith.cli.service.weights import CheckpointChoice, find_weights
from tinsmith.errors import ConfigError
from tinsmith.rl.evaluation.endpoint import Sampling
from tinsmith.rl.evaluation.held_out import judged_sources, scores_of
from tinsmith.rl.rewards.numbers import Number
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.runner import train

PACKAGES = Path(__file__).parents[2] / "integrations" / "verifiers" / "packages"
RUN_FILE = """
model: {name: tiny}
tasks: {train: {type: addition}, held_out: 3}
rewards: [{type: number}]
sampling: {max_tokens: 4}
eval: {every: 0, after: false}
groups_per_step: 2
group_size: 2
steps: 1
monitors: []
service: {engine: fake, source: tiny}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_llama) -> Path:
    """A working folder with a run file, a tiny model and a file of rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    (tmp_path / "small.yaml").write_text(RUN_FILE)
    rows = [{"q": f"{n} + 1 =", "a": f"so #### {n + 1}"} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.e2e
def test_run_is_evaluated_on_its_own_tasks_and_on_rows(folder, capsys):
    train("small.yaml", "folder=run")
    capsys.readouterr()
    words = ("run", "run/run.yaml", "rows.jsonl", "tasks.prompt={q}", "tasks.answer={a}", "tasks.answer_after=####")
    evaluate(*words, sampling=Sampling(samples=2, temperature=1.0, limit=2), as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["benchmark"] for row in rows} == {"run right", "run reward", "rows.jsonl right", "rows.jsonl reward"}
    assert {row["measure"] for row in rows} >= {"avg@2", "pass@2"}
    assert {row["problems"] for row in rows} == {2}
    base, tuned = dict.fromkeys(row["model"] for row in rows)
    assert (base, tuned[:9]) == ("tiny", "tinker://")
    assert all((row["against_first"] is None) == (row["model"] == base) for row in rows)


def rollout(text: str, *, correct: bool | None, reward: float = 0.0, error: str = "") -> Rollout:
    turn = Turn(prompt=(), tokens=(), logprobs=(), text=text, stop="stop")
    return Rollout.single((turn,), reward, correct=correct, error=error)


def test_held_out_tasks_become_scores_with_answers():
    tasks = [Task(id="a", messages=(), answer="7"), Task(id="a", messages=(), answer="8")]
    groups = [
        Group(task=tasks[0], rollouts=(rollout("so 7", correct=True, reward=1.0), rollout("none", correct=False))),
        Group(task=tasks[1], rollouts=(rollout("", correct=None, error="x"),)),
    ]
    right = judged_sources([groups], ["x", "y"], 1.0)
    assert right == {"x"}
    scores = scores_of("t", groups, ["", ""], 1.0, lambda _: [Number()], right={""})
    answers = {name: [(each.answer, each.score) for each in of] for name, of in scores["t right"].items()}
    assert answers == {"0 a": [("7", 1.0), ("none", 0.0)], "1 a": [("none", 0.0)]}
    assert {name: [each.score for each in of] for name, of in scores["t reward"].items()} == {"0 a": [1.0, 0.0]}
    named = scores_of("t", groups, ["x", "y"], 1.0, lambda _: (), right=right)
    assert list(named) == ["t/x right", "t/x reward"]


def test_rewards_say_what_is_right_up_to_the_threshold():
    def group(*rewards: float) -> Group:
        return Group(
            task=Task(id="a", messages=()), rollouts=tuple(rollout("", correct=None, reward=r) for r in rewards)
        )

    def judged(*models: Group) -> bool:
        return bool(judged_sources([[model] for model in models], ["s"], 1.0))

    assert judged(group(0.0, 0.5), group(1.0))
    assert not judged(group(0.0, 0.5))  # no reply is right, or none could be
    assert not judged(group(1.0), group(4.0))  # a score of another kind
    assert not judged(group())
    scores = scores_of("t", [group(0.5, 1.0)], [""], 1.0, lambda _: (), right={""})
    assert [each.score for each in scores["t right"]["0 a"]] == [0.0, 1.0]


def test_names_of_own_tasks_and_of_benchmarks():
    own = ("rows.jsonl", "d/rows.csv.gz", "run.yaml", "verifiers:gsm8k", "verifiers_legacy:x")
    assert all(map(is_own, own))
    assert not any(map(is_own, ("gsm8k", "inspect_evals/gsm8k", "mine.py@task", "hendrycks:x")))


def test_environment_by_name_is_evaluated_alone(folder):
    target = find_weights("tiny", [], folder)
    config = own_config("verifiers:gsm8k", target, Sampling(limit=7), (), ())
    (environment,) = config.environments
    assert (environment.type, environment.id, environment.weight, environment.held_out) == ("verifiers", "gsm8k", 0, 7)
    assert config.mode == "bench"
    assert [title(f"verifiers:{name}") for name in ("gsm8k", "./envs/gym.py", "/envs/gym")] == ["gsm8k", "gym", "gym"]
    words = ("environments.args.split=test", "environments.name=mine", "tasks.answer=a")
    (environment,) = own_config("verifiers:gsm8k", target, Sampling(), (), words).environments
    assert (environment.title, environment.model_dump()["args"]) == ("mine", {"split": "test"})


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        (("tiny", "rows.jsonl"), {}, "nothing says what its answers are worth"),
        (("tiny", "gsm8k"), {"reward": ("number",)}, "--reward is used by files of rows only"),
        (("tiny", "gsm8k", "tasks.answer=a"), {}, "'tasks.answer=a' is used by files of rows only"),
        (("tiny", "rows.jsonl", "environments.args.x=1"), {"reward": ("number",)}, "used by environments only"),
        (("tiny", "absent.jsonl"), {"reward": ("number",)}, "absent.jsonl"),
        (("tiny", "rows.jsonl"), {"sampling": Sampling(chat=True)}, "--chat is used by benchmarks"),
        (("tiny", "rows.jsonl"), {"reward": ("numbr",)}, "numbr"),
        (("tiny", "absent.yaml"), {}, "no file absent.yaml"),
        (("tiny", "gsm8k"), {"choice": CheckpointChoice(stage="rl")}, "--stage selects one of a run, and tiny is none"),
        (("tiny", "gsm8k"), {"choice": CheckpointChoice(checkpoint="best")}, "--checkpoint selects one of a run"),
    ],
)
def test_own_tasks_refuse_what_they_cannot_use(folder, words, options, error):
    with pytest.raises(ConfigError, match=error):
        evaluate(*words, "service.engine=fake", **options)


@pytest.mark.e2e
def test_environment_of_verifiers_is_evaluated(folder, monkeypatch, capsys):
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(PACKAGES)
    train("small.yaml", "folder=run")
    capsys.readouterr()
    sampling = Sampling(samples=3, temperature=1.0, max_tokens=2, limit=2)
    evaluate("run", "verifiers:duel", "environments.args.split=test", sampling=sampling, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {(row["benchmark"], row["measure"], row["problems"]) for row in rows} == {("duel reward", "avg@3", 2)}
    assert [row["against_first"] is None for row in rows] == [True, False]
    for name, error in (("no_such_taskset", "cannot load no_such_taskset"), ("./no_such.py", "no folder no_such.py")):
        with pytest.raises(ConfigError, match=error):
            evaluate("run", f"verifiers:{name}")


def stage(folder: Path, name: str, step: int) -> None:
    """A stage of a run with weights of `step`."""
    folder = folder / name
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(f"name: {name}\nmodel: {{name: tiny}}\nservice: {{engine: fake}}\n")
    state = {"step": step, "path": f"tinker://{name}/weights/w", "sampling_path": f"tinker://{name}/sampler_weights/w"}
    (folder / "state.json").write_text(json.dumps(state))


def test_stages_of_a_run_have_weights_of_their_own(folder):
    run = folder / "run"
    stage(run, "01-sft", 3)
    stage(run, "02-rl", 5)
    (run / "run.yaml").write_text("model: {name: tiny}\n")
    (run / "stages.json").write_text("{}")
    (run / "service" / "checkpoints").mkdir(parents=True)
    last, first = (find_weights("run", [], folder, CheckpointChoice(stage=name)) for name in ("", "sft"))
    assert (last.path, first.path) == ("tinker://02-rl/sampler_weights/w", "tinker://01-sft/sampler_weights/w")
    assert last.config.folder == first.config.folder == str(run.absolute())
    assert last.config.service.engine == "fake"
    with pytest.raises(ConfigError, match=r"has no stage dpo\. Its stages: sft, rl"):
        find_weights("run", [], folder, CheckpointChoice(stage="dpo"))
    with pytest.raises(ConfigError, match="a run without stages"):
        find_weights("run/02-rl", [], folder, CheckpointChoice(stage="dpo"))
