"""Files of minds_RL become runs; what they misspell or cannot mean is refused with the nearest name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tinsmith.dialects import find_dialect, read_run
from tinsmith.dialects.base import Copied, Translated
from tinsmith.errors import ConfigError
from tinsmith.integrations.minds.files.environments import EVALUATIONS, TYPES
from tinsmith.integrations.minds.files.translate import file_keys, recognizes, translate
from tinsmith.rl.config import RunConfig
from tinsmith.settings import paths

EXAMPLES = Path(__file__).parents[3] / "examples" / "minds"
FILE = """
[env]
id = "./environments/self_prediction"

[model]
base_model = "m"
"""
INTUITION = FILE.replace("self_prediction", "gradient_intuition")
VARIABLES = ("CURRICULUM_TIME_LIMIT_SECONDS", "WANDB_PROJECT", "RUN_ID", "MASTER_CONFIG_PATH")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def read(folder: Path, text: str, *overrides: str):
    file = folder / "task.toml"
    file.write_text(text)
    return read_run(file, overrides)


def with_lines(section: str, *lines: str) -> str:
    """FILE with more lines in a section."""
    added = "\n".join([f"[{section}]", *lines, ""])
    return FILE.replace(f"[{section}]\n", added) if f"[{section}]" in FILE else f"{FILE}\n{added}"


def test_defaults_are_those_of_the_harness(tmp_path):
    run = read(tmp_path, FILE)
    config = run.settings
    assert run.dialect == "minds_RL"
    assert (config.group_size, config.groups_per_step, config.steps, config.staleness) == (4, 4, 100_000, 2)
    assert (config.updates.stream, config.checkpoint.every, config.eval.every, config.model.rank) == (4, 20, 0, 32)
    assert (config.optimizer.learning_rate, config.sampling.max_tokens) == (3.162e-6, 2048)
    assert (config.algorithm.loss.type, config.algorithm.advantage.type) == ("importance_sampling", "grpo")
    assert (config.model.name, config.model.api_key_env, config.time_limit) == ("m", "TINKER_API_KEY", None)
    (environment,) = config.environments
    assert (environment.type, environment.title, environment.weight) == ("self_prediction", "self_prediction", 1.0)
    assert any("trainer.learning_rate: 3.162e-06 is small" in note for note in run.notes)


def test_every_key_is_copied_or_translated():
    own = set(paths(RunConfig))
    for key in file_keys():
        assert isinstance(key.fate, Copied | Translated), key
        assert not isinstance(key.fate, Copied) or key.fate.to in own, key


def test_mixture_keeps_names_weights_and_arguments(tmp_path):
    text = """
    [model]
    base_model = "m"
    renderer_name = "qwen3_disable_thinking"
    [trainer]
    batch_size = 6
    num_batches = 9
    stream_minibatches = 8
    [[envs]]
    name = "words"
    id = "./environments/ghost_trace"
    weight = 0.3
    args = { seed = 4, num_examples = -1 }
    [[envs]]
    id = "gradient_intuition"
    ratio = 0.1
    args.inner_env = "ghost_trace"
    args.inner_env_args = { words = "abstract" }
    args.alpha = 0.35
    args.shadow_rank = 8
    args.shadow_learning_rate = 2e-4
    [[envs]]
    id = "./evals/eval_ghost_ood"
    weight = 0.0
    [[envs]]
    id = "some_package"
    args = { split = "train", num_examples = 30 }
    """
    run = read(tmp_path, text)
    config, (words, intuition, ood, other) = run.settings, run.settings.environments
    assert (config.groups_per_step, config.steps, config.updates.stream) == (6, 9, 6)
    assert config.model.chat_template_values == {"enable_thinking": False}
    assert (words.type, words.title, words.weight, words.seed) == ("ghost_trace", "words", 0.3, 4)
    assert (intuition.type, intuition.weight, intuition.alpha) == ("gradient_intuition", 0.1, 0.35)
    assert (intuition.inner.type, intuition.inner.words) == ("ghost_trace", "abstract")
    assert (config.shadow.optimizer, config.shadow.learning_rate) == ("adam_fresh", 2e-4)
    assert (ood.type, ood.words, ood.weight, ood.evaluates) == ("ghost_trace", "abstract", 0.0, True)
    assert (other.type, other.id, other.args) == ("verifiers", "some_package", {"split": "train"})
    assert other.select == {"limit": 30}
    assert any("shadow_rank: not used" in note for note in run.notes)


EVALUATION = '[[envs]]\nname = "{0}"\nid = "./environments/{0}"\nweight = 0.0\n'
MIXTURE = """
[model]
base_model = "Qwen/Qwen3-30B-A3B"
renderer_name = "qwen3_disable_thinking"

[tinker]
api_key_env = "TINKER_API_KEY"

[trainer]
rollouts_per_example = 16
groups_per_batch = 64
total_batches = 50000
loss_fn = "importance_sampling"
stream_minibatches = 8
save_every = 10
eval_every = 200
seed = 7
args = { max_new_tokens = 8192 }

[[envs]]
id = "./environments/ghost_trace"
weight = 0.30
args = { seed = 3 }
[[envs]]
id = "./environments/gradient_prophet"
weight = 0.20
[[envs]]
id = "./environments/self_prediction"
weight = 0.23
[[envs]]
id = "./environments/entropy_intuition"
weight = 0.24
args = { num_examples = 2000 }
[[envs]]
id = "./environments/gradient_intuition"
weight = 0.0
args = { inner_env_id = "./environments/ghost_trace", alpha = 0.35, shadow_rank = 8, shadow_learning_rate = 1e-4 }
""" + "".join(map(EVALUATION.format, [*EVALUATIONS, "deception"]))
"""All eleven environments of minds_RL."""


def test_mixture_of_all_eleven_environments(tmp_path):
    run = read(tmp_path, MIXTURE)
    config = run.settings
    assert (config.group_size, config.groups_per_step, config.steps, config.eval.every) == (16, 64, 50_000, 200)
    assert {each.title: each.weight for each in config.environments if each.weight} == {
        "ghost_trace": 0.30, "gradient_prophet": 0.20, "self_prediction": 0.23, "entropy_intuition": 0.24,
    }  # fmt: skip
    evaluations = {each.title: each.held_out for each in config.environments if each.title.startswith("eval_")}
    assert list(evaluations.values()) == [50, 50, 100, 100, 120]
    assert len(config.environments) == 10
    assert any(re.search(r"envs\[10\]: left out: .* args.transcripts", note) for note in run.notes)


def test_mixture_evaluates_on_no_word_it_trains_on(tmp_path):
    text = MIXTURE.replace("args = { seed = 3 }", "args = { seed = 3, held_out = 20 }")
    text += EVALUATION.format("eval_ghost_static").replace('name = "eval', 'name = "other') + "args = { seed = 100 }\n"
    run = read(tmp_path, text)
    environments = {each.title: each for each in run.settings.environments}
    sampler, _ = environments["ghost_trace"].split(7, train=True)
    assert sampler is not None
    trained = {task.answer for task in sampler.draw(sampler.size)}
    for name in ("eval_ghost_static", "other_ghost_static", "eval_ghost_ood"):
        tasks = environments[name].split(7, train=False)[1]
        assert len(tasks) == (100 if name == "eval_ghost_ood" else 20)
        assert not trained & {task.answer for task in tasks}
    assert any("args.seed: not used" in note for note in run.notes)


def test_mixture_takes_precedence_over_a_single_environment(tmp_path):
    run = read(tmp_path, FILE + '[[envs]]\nid = "ghost_trace"\n')
    assert [each.title for each in run.settings.environments] == ["ghost_trace"]
    assert "env: not used, because envs is set." in run.notes


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_may_be_the_only_environment(name, tmp_path):
    args = "[env.args]\nnum_examples = 12\nseed = 5\n"
    (environment,) = read(tmp_path, FILE.replace("self_prediction", name) + args).settings.environments
    sampler, held_out = environment.split(0, train=True)
    assert sampler is not None
    assert len(held_out) == 12


def test_transcripts_of_a_local_file_are_evaluated(tmp_path):
    file = tmp_path / "transcripts.jsonl"
    text = FILE.replace("[env]", "[[envs]]") + EVALUATION.format("scheming") + f'args = {{ transcripts = "{file}" }}\n'
    _, deception = read(tmp_path, text).settings.environments
    assert (deception.type, deception.transcripts, deception.title) == ("deception", str(file), "scheming")


@pytest.mark.parametrize("name", [*(each for each in TYPES if each != "deception"), *EVALUATIONS])
def test_each_name_is_an_environment(name, tmp_path):
    text = f'[model]\nbase_model = "m"\n[[envs]]\nid = "ghost_trace"\n[[envs]]\nid = "./some/{name}"\nname = "each"\n'
    assert read(tmp_path, text).settings.environments[1].evaluates


FAULTS: list[tuple[str, str]] = [
    (with_lines("trainer", "rollout_per_example = 4"), r"Did you mean 'trainer.rollouts_per_example'"),
    (with_lines("trainer", 'rollouts_per_example = "many"'), r"trainer.rollouts_per_example.*a whole number"),
    (with_lines("trainer", "rollouts_per_example = 0"), "greater than or equal to 1"),
    (with_lines("trainer", 'loss_fn = "importance"'), r"there is no 'importance'. Did you mean 'importance_sampling'"),
    (with_lines("trainer", "batch_size = 2", "groups_per_batch = 2"), "trainer.batch_size.*is set too"),
    (with_lines("model", 'renderer_name = "qwen3_no_thinking"'), "the renderer 'qwen3_no_thinking' is not known"),
    (with_lines("model", 'renderer = "role_colon"'), "model.renderer.*role_colon is not a template of the model"),
    (FILE.replace('base_model = "m"', 'renderer = "qwen3"'), "'model.base_model' is missing"),
    (FILE.replace("self_prediction", "eval_deception"), "nothing to train on. Write it in .*envs.* with weight = 0"),
    (FILE.replace("self_prediction", "eval_ghost_ood") + "[env.args]\nsede = 3", "Did you mean 'seed'"),
    (FILE.replace('[env]\nid = "./environments/self_prediction"', ""), "there is no environment"),
    (with_lines("env.args", "heigh = 20"), r"env.args.heigh.*Did you mean 'high'"),
    (INTUITION + '[env.args]\ninner_env_id = "gosth_trace"', "Did you mean 'ghost_trace'"),
    (with_lines("env.args", "low = 30", "high = 20"), "low 30 is above high 20"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "match"), FAULTS)
def test_faults_name_the_key_and_the_nearest(text, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, text)


def test_overrides_take_keys_of_the_file_and_of_a_run(tmp_path):
    config = read(tmp_path, FILE, "trainer.groups_per_batch=3", "group_size=2", "env.args.high=20", "steps=5").settings
    assert (config.groups_per_step, config.group_size, config.steps, config.environments[0].high) == (3, 2, 5, 20)


def test_environment_variables_of_the_runner(tmp_path, monkeypatch):
    for name, value in zip(VARIABLES, ("21000", "minds", "abc", "x.toml"), strict=True):
        monkeypatch.setenv(name, value)
    run = read(tmp_path, FILE)
    assert run.settings.time_limit == 21_000
    assert run.settings.folder == "outputs/abc/task"
    assert [monitor.type for monitor in run.settings.monitors] == ["console", "report", "wandb"]
    assert [note.partition(":")[0] for note in run.notes if note.partition(":")[0] in VARIABLES] == list(VARIABLES)


def test_key_of_the_server_is_in_the_named_variable(tmp_path, monkeypatch):
    from tinsmith.runner import server

    monkeypatch.setenv("TINKER_BASE_URL", "http://localhost:1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-other")
    monkeypatch.setenv("MY_KEY", "tml-mine")
    with server(read(tmp_path, with_lines("tinker", 'api_key_env = "MY_KEY"')).settings) as address:
        assert address == ("http://localhost:1", "tml-mine")


def test_files_of_others_are_not_recognized():
    own: list[dict[str, Any]] = [
        {"model": {"name": "m"}, "environments": [{"type": "ghost_trace"}]},
        {"env": {"env_args": {}}, "model": {"lora_rank": 3}},
        {"trainer": {"total_epochs": 3}},
    ]
    assert [recognizes(values) for values in own] == [False, False, False]
    with pytest.raises(ConfigError, match="'model' is missing"):
        translate({"envs": []}, "file")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_examples_are_files_of_the_dialect(file):
    dialect = find_dialect(tomllib.loads(file.read_text()))
    assert dialect is not None
    assert dialect.name == "minds_RL"
    run = read_run(file)
    assert run.settings.environments
    assert run.settings.eval.every
