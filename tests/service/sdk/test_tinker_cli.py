"""Every command of the unmodified `tinker` 0.38 against the service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.service.conftest import Served, datum
from tests.service.sdk.huggingface_hub import Hub, hub
from tests.service.sdk.tinker_command import Tinker, tinker_command
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pushed() -> Iterator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture(scope="module")
def cli(
    served: Served, pushed: Hub, forked_programs: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tinker]:
    home = str(tmp_path_factory.mktemp("home"))
    places = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": served.key, "HOME": home}
    hub = {"HF_ENDPOINT": pushed.url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}  # read when they are imported
    with tinker_command(forked_programs, **places, **hub, COLUMNS="200") as call:
        yield call


@pytest.fixture(scope="module")
def saved(served: Served) -> dict[str, str]:
    """A trained model's checkpoints, one of each kind."""
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key, user_metadata={"who": "cli"})
    train = client.create_lora_training_client("toy", rank=4).result()
    train.forward_backward([datum([5, 6, 7, 8], weights=[1.0] * 3)], "cross_entropy").result()
    train.optim_step(types.AdamParams(learning_rate=0.02)).result()
    paths = {
        "state": train.save_state("state").result().path,
        "sampler": train.save_weights_for_sampler("sampler").result().path,
        "external": train.save_weights_external("external").result().path,
    }
    sampling = client.create_sampling_client(model_path=paths["sampler"]).result()
    # With this seed neither sample ends early.
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=1)
    sampling.sample(prompt, num_samples=2, sampling_params=params).result()
    client.close("success").result()
    return paths


@pytest.fixture
def state(served: Served) -> Iterator[str]:
    """A state checkpoint to change or delete."""
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    yield client.create_lora_training_client("toy", rank=2).result().save_state("s").result().path
    client.close("success").result()


def run_of(path: str) -> str:
    return path.split("/")[2]


def test_version_status_and_whoami(cli: Tinker) -> None:
    assert "0.38.0" in cli("version").out
    assert "Tinker accessible: yes" in cli("auth", "status").out
    assert cli.json("auth", "whoami") == {
        "user_urn": "tml:user:local",
        "org_urn": "tml:organization:local",
        "email": None,
    }


def test_model_list(cli: Tinker) -> None:
    assert "toy" in cli("model", "list").out
    assert "other/model" in cli("model", "list", "other").out
    assert "toy" not in cli("model", "list", "other").out


def test_run_list_and_info(cli: Tinker, saved: dict[str, str]) -> None:
    run = run_of(saved["state"])
    assert run in [run["training_run_id"] for run in cli.json("run", "list", "--limit", "0")["runs"]]
    info = cli.json("run", "info", run)
    assert info["training_run_id"] == run
    assert info["last_checkpoint"]["tinker_path"] == saved["state"]
    assert run in cli("run", "list").out


def test_checkpoint_lists(cli: Tinker, saved: dict[str, str]) -> None:
    of_run = cli.json("checkpoint", "list", "--run-id", run_of(saved["state"]))["checkpoints"]
    assert [item["tinker_path"] for item in of_run] == [saved[kind] for kind in ("external", "sampler", "state")]
    listed = cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert set(saved.values()) <= {checkpoint["tinker_path"] for checkpoint in listed}
    assert len(cli.json("checkpoint", "list", "--limit", "1")["checkpoints"]) == 1


def test_checkpoint_info(cli: Tinker, saved: dict[str, str]) -> None:
    info = cli.json("checkpoint", "info", saved["sampler"])
    assert (info["checkpoint_type"], info["lora_rank"], info["public"]) == ("sampler", 4, False)
    missing = cli("checkpoint", "info", saved["sampler"] + "x")
    assert (missing.status, "Checkpoint not found" in missing.err) == (1, True)


def test_publish_and_set_ttl(cli: Tinker, state: str) -> None:
    for command, public in (("publish", True), ("publish", True), ("unpublish", False), ("unpublish", False)):
        assert cli("checkpoint", command, state).status == 0
        assert cli.json("checkpoint", "info", state)["public"] is public
    assert cli("checkpoint", "set-ttl", state, "--ttl", "7200").status == 0
    end = datetime.fromisoformat(cli.json("checkpoint", "info", state)["expires_at"])
    assert timedelta(minutes=119) < end - datetime.now(UTC) <= timedelta(hours=2)
    assert cli("checkpoint", "set-ttl", state, "--remove").status == 0
    assert cli.json("checkpoint", "info", state)["expires_at"] is None
    refused = cli("checkpoint", "set-ttl", state, "--ttl", "5")
    assert (refused.status, "ttl_seconds is 5" in refused.err) == (1, True)


def test_delete_by_path_and_by_run(cli: Tinker, served: Served) -> None:
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    train = client.create_lora_training_client("toy", rank=2).result()
    paths = [train.save_state(f"s{number}").result().path for number in range(3)]
    path = train.save_weights_for_sampler("kept").result().path
    assert cli.json("checkpoint", "delete", "-y", paths[0]) == {"deleted_count": 1, "failed": []}
    run = run_of(path)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    none = cli("checkpoint", "delete", "-y", "--run-id", run, "--after", tomorrow)
    assert "No checkpoints found" in none.out
    answer = cli("checkpoint", "delete", "--run-id", run, "--type", "weights", "--before", tomorrow, stdin="y\n")
    assert (answer.status, "Deleted 2 checkpoint(s)" in answer.out) == (0, True)
    [left] = cli.json("checkpoint", "list", "--run-id", run)["checkpoints"]
    assert left["tinker_path"] == path
    again = cli.json("checkpoint", "delete", "-y", paths[0])
    assert (again["deleted_count"], again["failed"][0]["tinker_path"]) == (0, paths[0])
    client.close("success").result()


@pytest.mark.parametrize("kind", ["state", "external"])
def test_download(cli: Tinker, saved: dict[str, str], kind: str, tmp_path: Path) -> None:
    before = cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    report = cli.json("checkpoint", "download", saved[kind], "--output", str(tmp_path))
    folder = Path(report["destination"])
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert report["file_size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    tensors = load_file(folder / "adapter_model.safetensors")
    assert any(np.any(tensor) for name, tensor in tensors.items() if "lora_B" in name)
    again = cli("checkpoint", "download", saved[kind], "--output", str(tmp_path))
    assert (again.status, "already exists" in again.err) == (1, True)
    assert cli("checkpoint", "download", saved[kind], "--output", str(tmp_path), "--force").status == 0
    assert cli.json("checkpoint", "list", "--limit", "0")["checkpoints"] == before


def test_push_to_the_hub(cli: Tinker, saved: dict[str, str], pushed: Hub) -> None:
    said = cli.json("checkpoint", "push-hf", saved["state"], "--repo", "smith/adapter")
    assert (said["repo_id"], said["public"]) == ("smith/adapter", False)
    assert pushed.repos["adapter"].get("visibility") == "private", pushed.repos
    assert sorted(pushed.files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    card = pushed.files["README.md"].decode()
    assert "base_model: toy" in card
    assert "LoRA rank: 4" in card
    assert saved["state"] in card
    assert isinstance(json.loads(pushed.files["adapter_config.json"])["base_model_name_or_path"], str)


def test_session_trace(cli: Tinker, saved: dict[str, str], tmp_path: Path) -> None:
    session = run_of(saved["state"]).partition(":")[0]
    file = tmp_path / "trace.pftrace"
    report = cli.json("session", "export-trace", session, "--output", str(file))
    assert report["file_size_bytes"] == file.stat().st_size
    events = json.loads(file.read_text())["traceEvents"]
    ran = [event["name"] for event in events if event["ph"] == "X"]
    assert ran == ["create", "forward_backward", "step", "save_state", "save_sampler", "save_external"]
    [sample] = [event for event in events if event["ph"] == "b" and event["name"] == "sample"]
    assert (sample["args"]["prompt_tokens"], sample["args"]["tokens"]) == (3, 8)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["train:0", "sample:0"]
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times)
    assert cli("session", "export-trace", session, "--url-only").out.startswith("http://127.0.0.1")
    assert cli("session", "export-trace", "no-such").status == 1


def test_billing_usage(cli: Tinker, saved: dict[str, str]) -> None:
    session = run_of(saved["state"]).partition(":")[0]
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [(now + timedelta(hours=hours)).isoformat() for hours in (-1, 1)]
    report = cli.json("billing", "usage", *window)
    counts = {}
    for event in report["data"]:
        if event["session_id"] == session:
            info = event["event_info"]
            counts[info["type"]] = counts.get(info["type"], 0) + (info.get("token_count") or info.get("count"))
    assert counts["training"] == 3
    assert counts["sampling_prefill"] == 3
    assert counts["sampling_sample"] == 8
    assert counts["checkpoint"] == 3
    assert report["sessions"][session]["user_metadata"] == {"who": "cli"}
    assert any(datum["event_info"]["type"] == "storage" for datum in report["data"])
    assert "training" in cli("billing", "usage", *window, "--csv", "-").out
    wrong = cli("billing", "usage", window[1], window[0])
    assert (wrong.status, "empty or too long" in wrong.err) == (1, True)
    listed = cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    [stored] = [
        datum for datum in cli.json("billing", "checkpoint-storage")["data"] if datum["project_id"] == "default"
    ]
    assert stored["checkpoint_count"] == len(listed)
    assert stored["size_bytes"] == sum(checkpoint["size_bytes"] for checkpoint in listed)
    assert cli.json("billing", "checkpoint-storage", "--project-id", "none")["data"] == []


def test_login_and_logout(served: Served, tmp_path: Path) -> None:
    places = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": "", "HOME": str(tmp_path)}
    with tinker_command(**places) as cli:
        assert cli("auth", "status").status == 1
        wrong = cli("auth", "login", stdin="tml-wrong\n")
        assert (wrong.status, "HTTP 401" in wrong.err) == (1, True)
        assert "Logged in as local" in cli("auth", "login", stdin=f"{served.key}\n").out
        assert "Tinker accessible: yes" in cli("auth", "status").out
        assert cli("run", "list").status == 0
        assert "Removed credential" in cli("auth", "logout").out
        assert cli("run", "list").status == 1


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_download_loads_in_peft(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT computes the logprobs of the service."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tiny("untied")
    tokens = [5, 6, 7, 8, 9, 10]
    config = ServeConfig(models=(str(base),), data=tmp_path / "data", device="cpu", dtype="float32", threads=1)
    with embedded(config) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        train = client.create_lora_training_client(str(base), rank=4, seed=1).result()
        data = [datum(tokens, weights=[1.0] * 5)]
        for _ in range(3):
            train.forward_backward(data, "cross_entropy")
            train.optim_step(types.AdamParams(learning_rate=0.05)).result()
        ours = train.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        path = train.save_state("final").result().path
        with tinker_command(TINKER_BASE_URL=url, TINKER_API_KEY=key, HOME=str(tmp_path)) as cli:
            folder = cli.json("checkpoint", "download", path, "--output", str(tmp_path))["destination"]
        client.close("success").result()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = plain(torch.tensor([tokens[:-1]])).logits.log_softmax(-1)
        after = PeftModel.from_pretrained(plain, folder)(torch.tensor([tokens[:-1]])).logits.log_softmax(-1)
    picked = after[0, range(5), tokens[1:]].numpy()
    assert np.abs(picked - before[0, range(5), tokens[1:]].numpy()).max() > 0.1
    np.testing.assert_allclose(picked, ours, atol=1e-4)
