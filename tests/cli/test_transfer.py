"""`tinsmith import` and `tinsmith export` against a service: what comes in is trained on, what goes out is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file
from tinker import types

from tests.architectures import save_tiny
from tests.engine.exchange.test_imported_experts import write_peft
from tests.engine.reference import tied_embeddings_are_meant, write_adapter
from tests.service.conftest import Served, datum, served_by
from tests.service.sdk.huggingface_hub import hub
from tinsmith.cli import app
from tinsmith.engine.base import LoraSpec
from tinsmith.errors import TinsmithError, UserError

pytestmark = pytest.mark.e2e

TOKENS = [5, 17, 300, 8, 44, 101, 9, 2]


@dataclass(frozen=True)
class Done:
    """What a command did."""

    stdout: str
    error: TinsmithError | None = None
    stderr: str = ""


Command = Callable[..., Done]


@pytest.fixture(scope="module")
def torch_served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by("torch", tiny_llama, tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def command(torch_served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs a command in this process: importing torch again takes seconds."""
    monkeypatch.setenv("TINKER_BASE_URL", torch_served.url)
    monkeypatch.setenv("TINKER_API_KEY", torch_served.key)

    def call(*words: object) -> Done:
        error = None
        try:
            app([str(word) for word in words], exit_on_error=False, print_error=False, result_action="return_value")
        except TinsmithError as raised:
            error = raised
        out, err = capsys.readouterr()
        return Done(out, error, err)

    return call


@pytest.fixture
def client(torch_served: Served) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=torch_served.url, api_key=torch_served.key)


def peft_logprobs(base: Path, adapter: Path | None) -> np.ndarray:
    """Logprobs of TOKENS by transformers and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with tied_embeddings_are_meant():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
        model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


def served_logprobs(client: tinker.ServiceClient, path: str) -> np.ndarray:
    sampling = client.create_sampling_client(model_path=path).result()
    return np.array(sampling.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:], np.float32)


def test_peft_adapter_is_imported_trained_on_and_exported(
    command: Command, client: tinker.ServiceClient, tiny_llama: Path, tmp_path: Path
):
    lora = LoraSpec(rank=6, seed=3, alpha=24, train_mlp=False, train_unembed=False)
    adapter = write_adapter(tiny_llama, tmp_path / "peft", lora, size=0.2)
    done = command("import", adapter, "--name", "from-peft", "--model", "toy")
    assert done.error is None
    path = done.stdout.strip()
    assert path.endswith("/weights/from-peft")
    expected = peft_logprobs(tiny_llama, adapter)
    assert np.abs(expected - peft_logprobs(tiny_llama, None)).max() > 0.05
    np.testing.assert_allclose(served_logprobs(client, path), expected, atol=1e-4)

    train = client.create_training_client_from_state(path).result()
    assert train.get_info().lora_rank == 6
    result = train.forward_backward([datum(TOKENS, weights=[1.0] * 7)], "cross_entropy").result()
    np.testing.assert_allclose(result.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=1e-4)
    train.optim_step(types.AdamParams(learning_rate=0.02)).result()
    state = train.save_state("on").result().path
    assert command("export", state, "--to", tmp_path / "out").error is None
    trained = served_logprobs(client, state)
    assert np.abs(trained - expected).max() > 0.01
    np.testing.assert_allclose(peft_logprobs(tiny_llama, tmp_path / "out"), trained, atol=1e-4)


def test_training_state_returns_exactly(command: Command, client: tinker.ServiceClient, tmp_path: Path):
    train = client.create_lora_training_client("toy", rank=4, seed=1).result()
    for _ in range(2):
        train.forward_backward([datum(TOKENS, weights=[1.0] * 7)], "cross_entropy").result()
        train.optim_step(types.AdamParams(learning_rate=0.02)).result()
    state = train.save_state("round").result().path
    assert command("export", state, "--to", tmp_path / "out", "--format", "tinker").error is None
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in names
    done = command("import", tmp_path / "out", "--name", "back")
    assert done.error is None
    path = done.stdout.strip()
    np.testing.assert_array_equal(served_logprobs(client, path), served_logprobs(client, state))
    clients = [client.create_training_client_from_state_with_optimizer(each).result() for each in (state, path)]
    results = []
    for each in clients:
        each.forward_backward([datum(TOKENS, weights=[1.0] * 7)], "cross_entropy").result()
        each.optim_step(types.AdamParams(learning_rate=0.02)).result()
        results.append(served_logprobs(client, each.save_state("next").result().path))
    np.testing.assert_array_equal(*results)


def test_merged_model_has_logprobs_of_adapter(
    command: Command, client: tinker.ServiceClient, torch_served: Served, tiny_llama: Path, tmp_path: Path
):
    adapter = write_adapter(tiny_llama, tmp_path / "peft", LoraSpec(rank=3, seed=4), size=0.2)
    path = command("import", adapter, "--name", "merge").stdout.strip()
    with hub() as stub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_x")
        patch.setattr(huggingface_hub.constants, "ENDPOINT", stub.url)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        options = ("--format", "merged", "--data", torch_served.data, "--push", "smith/merged")
        done = command("export", path, "--to", tmp_path / "merged", *options)
        assert done.error is None
        assert stub.repos["merged"]["visibility"] == "private"
        assert f"tinsmith serve --model {tmp_path / 'merged'}" in done.stderr
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= stub.files.keys()
    np.testing.assert_allclose(peft_logprobs(tmp_path / "merged", None), served_logprobs(client, path), atol=1e-4)


def test_refusals_say_what_is_wrong(command: Command, tiny: Callable[[str], Path], tmp_path: Path):
    adapter = write_adapter(tiny("untied"), tmp_path / "other", LoraSpec(rank=3, seed=4))
    config = json.loads((adapter / "adapter_config.json").read_text())
    cases = {
        "shape": ({"r": 5}, "The archive does not fit: model.layers.0.self_attn.q_proj.lora_A.weight"),
        "dora": ({"use_dora": True}, "use_dora=True"),
        "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
    }
    for name, (changes, message) in cases.items():
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        done = command("import", adapter, "--name", name)
        assert isinstance(done.error, UserError)
        assert message in str(done.error)
    moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "steps": torch.tensor(1)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(moments, adapter / "optimizer.safetensors")
    assert "is not the optimizer state" in str(command("import", adapter, "--name", "moments").error)
    (adapter / "optimizer.safetensors").unlink()
    done = command("import", tmp_path, "--name", "x")
    assert "holds no adapter" in str(done.error)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert "elsewhere is not served here" in str(
        command("import", adapter, "--name", "x", "--model", "elsewhere").error
    )
    done = command("export", adapter, "--to", tmp_path / "x.gguf", "--format", "gguf")
    assert "convert_hf_to_gguf.py of llama.cpp is not on PATH" in str(done.error)
    assert "There is no checkpoint" in str(command("export", "tinker://x/weights/y", "--to", tmp_path / "x").error)


@pytest.mark.slow
def test_adapter_of_experts_is_imported_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Experts as PEFT trains them, without attention: the run that a client sees trains the MLP only."""
    base = save_tiny("qwen3_moe", tmp_path / "base", num_hidden_layers=2)
    write_peft(base, tmp_path / "peft", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    with served_by("torch", base, tmp_path / "data") as served:
        monkeypatch.setenv("TINKER_BASE_URL", served.url)
        monkeypatch.setenv("TINKER_API_KEY", served.key)
        app(["import", str(tmp_path / "peft"), "--name", "in", "--model", "toy"], result_action="return_value")
        path = capsys.readouterr().out.strip()
        client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
        np.testing.assert_allclose(served_logprobs(client, path), peft_logprobs(base, tmp_path / "peft"), atol=1e-4)
        train = client.create_training_client_from_state(path).result()
        train.forward_backward([datum(TOKENS, weights=[1.0] * 7)], "cross_entropy").result()
        train.optim_step(types.AdamParams(learning_rate=0.02)).result()
        state = train.save_state("on").result().path
        assert np.abs(served_logprobs(client, state) - served_logprobs(client, path)).max() > 0.01
        info = tinker.RestClient(base_url=served.url, api_key=served.key).get_weights_info_by_tinker_path(path).result()
        assert (info.train_attn, info.train_mlp, info.train_unembed) == (False, True, False)


def test_run_is_exported_with_a_model_card(
    command: Command, client: tinker.ServiceClient, tiny_llama: Path, tmp_path: Path
):
    adapter = write_adapter(tiny_llama, tmp_path / "peft", LoraSpec(rank=3, seed=4), size=0.2)
    path = command("import", adapter, "--name", "of-run").stdout.strip()
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text("{name: sums, model: {name: toy, rank: 3}}")
    (run / "state.json").write_text(json.dumps({"step": 2, "path": path}))
    done = command("export", run, "--to", tmp_path / "out")
    assert done.error is None
    assert done.stdout.strip().endswith("of step 2")
    assert f"tinsmith import {tmp_path / 'out'} --name NAME" in done.stderr
    np.testing.assert_allclose(peft_logprobs(tiny_llama, tmp_path / "out"), served_logprobs(client, path), atol=1e-4)
    assert "# `sums`" in (tmp_path / "out" / "README.md").read_text()
    assert "--checkpoint selects" in str(command("export", path, "--to", tmp_path / "x", "--checkpoint", "last").error)
    (run / "run.yaml").write_text("{service: {engine: fake}}")
    (run / "service" / "checkpoints").mkdir(parents=True)
    assert "dry run" in str(command("export", run, "--to", tmp_path / "x").error)
