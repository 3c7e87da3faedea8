"""Names of other systems are answered with ours, and their files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.cli import main
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError
from tinsmith.overrides import forms_at
from tinsmith.rl.config import RunConfig
from tinsmith.rl.config.other_names import OTHER_NAMES
from tinsmith.settings import paths

RUN = "model: {name: m}\ntasks: {train: {type: addition}}\nrewards: [{type: number}]\nsteps: 1\n"


def test_each_of_our_names_exists():
    assert [row for row in OTHER_NAMES if not all(forms_at(RunConfig, key.split(".")) for key in row.our_keys)] == []


def test_no_other_name_is_a_key_of_ours():
    top_level = set(paths(RunConfig))
    assert [row.name for row in OTHER_NAMES if row.name in top_level and row.name not in row.our_keys] == []


def refusal(folder: Path, text: str, *overrides: str, name: str = "run.yaml") -> str:
    file = folder / name
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_run(file, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("num_generations", "group_size"),
        ("beta", "algorithm.kl.coef"),
        ("lr", "optimizer.learning_rate"),
        ("batch_size", "groups_per_step"),
        ("sampling.max_new_tokens", "sampling.max_tokens"),
        ("actor_rollout_ref.rollout.n", "group_size"),
        ("trainer.total_epochs", "epochs"),
        ("model.path", "model.name"),
        ("service.url", "model.base_url"),
        ("algorithm.kl_coef", "algorithm.kl.coef"),
    ],
)
def test_names_of_other_systems_are_answered_with_ours(tmp_path: Path, key: str, ours: str):
    assert f"; here: {ours}" in refusal(tmp_path, RUN, f"{key}=1")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("tasks.train={type: hub, name: x, path: y}", "there is no key 'tasks.train.path'. It belongs to another type"),
        ("tasks.path=x", "Did you mean 'tasks.train.path'?"),
        ("rewards=math", "'rewards' takes a list, such as [{type: math}] (got 'math')."),
        ("monitors=[wandb]", "'monitors.0' takes keys with values, such as {type: wandb} (got 'wandb')."),
        ("algorithm=ppo", "'algorithm' takes keys with values, such as {type: ppo} (got 'ppo')."),
        ("tasks.train={low: 1}", "one of addition, largest, reasoning_gym, custom, rows, jsonl, files, hub, sql."),
    ],
)
def test_advice_is_valid_where_the_key_stands(tmp_path: Path, override: str, sentence: str):
    assert sentence in refusal(tmp_path, RUN, override)


def test_names_in_a_file_are_answered_with_ours(tmp_path: Path):
    assert "num_generations is TRL's name; here: group_size." in refusal(tmp_path, RUN + "num_generations: 4\n")


@pytest.mark.parametrize(
    ("text", "system", "name"),
    [
        ("max_steps = 1\n[orchestrator]\nbatch_size = 8\n[trainer.optim]\nlr = 1e-6\n", "prime-rl", "rl.toml"),
        ('[model]\nname = "m"\n[optim]\nlr = 1e-6\n', "prime-rl", "sft.toml"),
        ('model = "m"\n[[eval]]\nenv_id = "gsm8k"\n', "verifiers", "eval.toml"),
        ('[env]\nharness = { id = "null" }\ntaskset = { id = "x" }\n', "verifiers", "env.toml"),
        ("actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {total_epochs: 1}\n", "verl", "ppo.yaml"),
        ('model = "m"\n[inference]\ngpus = 1\n[trainer.args]\nmax_steps = 2\n', "verifiers", "vf.toml"),
        ("rollouts_per_example = 2\n[[eval]]\nid = 'x'\n", "verifiers", "evals.toml"),
        ('model = "m"\n[client]\nbase_url = "u"\n[[source]]\nenv.taskset.id = "x"\n', "prime-rl", "sources.toml"),
        ('batch_size = 8\n[model]\nname = "m"\n[environment]\nid = "x"\n', "prime-rl", "orch.toml"),
        ('use_deep_gemm = true\n[vllm]\nmodel = "m"\n', "prime-rl", "inference.toml"),
        ('[client]\nbase_url = ["u"]\n[model]\nname = "m"\n', "prime-rl", "base.toml"),
        ("data: {rllm: {overlength_policy: error}}\noptim: {lr: 1e-5}\n", "rLLM's supervised fine-tuning", "s.yaml"),
        ("data: {micro_batch_size_per_gpu: 4}\noptim: {lr: 1e-5}\n", "verl", "sft.yaml"),
        ("supported_models: [{model_name: m}]\n", "a TuFT server", "server.yaml"),
        ("model_name_or_path: m\nper_device_train_batch_size: 1\n", "TRL", "grpo.yaml"),
    ],
)
def test_files_of_other_systems_are_refused_by_name(tmp_path: Path, text: str, system: str, name: str):
    message = refusal(tmp_path, text, name=name)
    assert f"is a file of {system}, because it has '" in message
    assert "Did you mean" not in message


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("model: {model_path: m}\nbuffer: {batch_sze: 1}\n", "Trinity-RFT, because it has 'model.model_path'."),
        ("training: {group_sze: 1}\n", "rLLM, because it has 'training'."),
        ("model: {base_model: m}\nenv: {id: x}\ntrainer: {a: x}\n", "minds_RL, because it has 'model.base_model'."),
    ],
)  # fmt: skip
def test_refusals_begin_with_the_kind_of_file(tmp_path: Path, text: str, begin: str):
    assert refusal(tmp_path, text).splitlines()[0].endswith(f" is read as a file of {begin}")


def test_refusals_name_keys_of_the_file(tmp_path: Path):
    text = "model: {model_path: m, max_response_tokens: 8, lora_configs: [{lora_rank: 0}]}\n"
    text += "buffer: {total_steps: 1, explorer_input: {taskset: {path: a}, default_workflow_type: math_workflow}}\n"
    message = refusal(tmp_path, text + "algorithm: {algorithm_type: grpo, repeat_times: 2}\n")
    assert "model.lora_configs[].lora_rank" in message
    assert "model.rank" not in message


SETTINGS = [
    (("check", "run.yaml", "--steps", "3"), "A setting has no hyphens before it: steps=3."),
    (("check", "run.yaml", "--steps=3"), "A setting has no hyphens before it: steps=3."),
    (("serve", "--cache-token", "5"), "A setting has no hyphens before it: cache_tokens=5."),
    (("serve", "--cluster.samplers"), "A setting has no hyphens before it: cluster.samplers=VALUE."),
    (("serve", "--thread", "3"), "Did you mean --threads?"),
    (("serve", "--xyzzy"), "error: Unknown option: --xyzzy.\n--help lists the options."),
]


@pytest.mark.parametrize(("words", "text"), SETTINGS)
def test_options_that_are_settings_are_explained(words: tuple[str, ...], text: str, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tinsmith", *words])
    with pytest.raises(SystemExit):
        main()
    assert text in capsys.readouterr().err
