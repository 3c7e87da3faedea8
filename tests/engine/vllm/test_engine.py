"""A trainer and a stub of vLLM beside it: requests, versions, restarts, command line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.engine.exchange.test_exchange import write_peft
from tests.engine.sampling.helpers import PROMPT, assert_same_samples, sample_request
from tests.engine.vllm import stub as vllm_stub
from tinsmith.engine.base import AdamParams, LoraSpec, ModelCard
from tinsmith.engine.build import build
from tinsmith.engine.cluster.cluster import ClusterEngine, ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.memory_plan import Gpu, MemoryPlan, ModelSizes, VllmPlan
from tinsmith.engine.processes import supervisor
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine.vllm import client, server
from tinsmith.engine.vllm.server import VllmServer, command_of, environment_of, find_python
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError, EngineDied, EngineError, Gone, Unsupported

FACTS = ModelSizes(
    source="m", weight_bytes=1, loading_bytes=0, token_bytes=1, state_bytes=0, activation_bytes=1.0, layer_bytes=1.0,
    vocab_size=8, context_length=64, parameters_per_rank=0, stack_bytes=0, layer_weight_bytes=0, layers=1,
    vllm_weight_bytes=1, vllm_parameters_per_rank=0,
)  # fmt: skip
CARD = ModelCard(
    source="here", tokenizer="/here", arch="llama", vocab_size=512, context_length=64, eos_token_ids=(2,),
    dtype="bfloat16", device="cpu",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


def cluster_of(model: Path, folder: Path, settings: VllmConfig) -> ModelCluster:
    config = EngineConfig(source=str(model), dtype="float32", device="cpu", threads=1, sampler="vllm", vllm=settings)
    return ModelCluster(config, ClusterConfig(), LocalSlots(), folder)


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, python: Path, folder: Path, wait: Any) -> Iterator[ModelCluster]:
    settings = VllmConfig(python=python, rank=8, args=("--record", str(folder / "record")))
    cluster = cluster_of(tiny_llama, folder, settings)
    yield cluster
    wait(cluster.close())


@pytest.fixture(scope="module")
def engine(cluster: ModelCluster, wait: Any) -> Iterator[ClusterEngine]:
    engine = wait(cluster.start())
    yield engine
    wait(engine.close())


@pytest.fixture
def recorded(folder: Path) -> Callable[[str], list[Any]]:
    """Bodies of the requests to a path since the test began."""
    record = folder / "record"
    record.unlink(missing_ok=True)

    def of(path: str) -> list[Any]:
        lines = record.read_text().splitlines() if record.exists() else []
        return [body for place, body in map(json.loads, lines) if place == path]

    return of


@pytest.fixture
def version(engine: ClusterEngine, wait: Any, model_id: str, tmp_path: Path) -> Iterator[str]:
    """A version whose folder is `kept`."""
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.capture(model_id, f"{model_id}-version"))
    wait(engine.persist(f"{model_id}-version", tmp_path / "kept"))
    yield f"{model_id}-version"
    wait(engine.detach(f"{model_id}-version"))
    wait(engine.drop(model_id))


async def until(done: Callable[[], bool]) -> None:
    for _ in range(2400):  # two minutes
        if done():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to pass")


def test_request_body_overrides_the_defaults_of_vllm():
    body = client.request_body(
        sample_request([5, 6], max_tokens=None, stop_tokens=None, seed=None), CARD, "v1", stream=False
    )
    assert body == {
        "model": "v1", "prompt": [5, 6], "n": 1, "max_tokens": 62, "temperature": 1.0, "stop_token_ids": [2],
        "ignore_eos": True, "stop": [], "include_stop_str_in_output": True, "logprobs": 0,
        "return_tokens_as_token_ids": True, "return_token_ids": True, "stream": False,
    }  # fmt: skip
    body = client.request_body(
        sample_request(num_samples=3, stop_strings=("\n",), stop_tokens=(7,), cache_scope="a"), CARD, "v1", stream=True
    )
    assert body["cache_salt"] == "a"
    assert (body["n"], body["stop"], body["stop_token_ids"], body["max_tokens"]) == (3, ["\n"], [7], 16)
    assert body["stream_options"] == {"include_usage": True}


def test_neighbouring_seeds_are_hashed_apart():
    seeds = [
        client.request_body(sample_request(seed=seed, num_samples=8), CARD, "base", stream=False)["seed"]
        for seed in range(9)
    ]
    assert len({seed + sample for seed in seeds for sample in range(8)}) == 72
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_samples_are_parsed_from_the_response(engine: ClusterEngine, wait: Any, recorded: Any):
    sampled = wait(engine.sample(sample_request([10, 20], num_samples=2, max_tokens=5, stop_tokens=(23,))))
    assert [sequence.tokens.tolist() for sequence in sampled.sequences] == [[21, 22, 23], [22, 23]]
    assert [sequence.stop_reason for sequence in sampled.sequences] == ["stop", "stop"]
    np.testing.assert_allclose(sampled.sequences[0].logprobs, [-0.21, -0.22, -0.23], atol=1e-6)
    assert sampled.sequences[0].topk is None
    assert sampled.prompt_cache_hit_tokens == 1
    (long,) = wait(engine.sample(sample_request([10, 20], max_tokens=3))).sequences
    assert (long.tokens.tolist(), long.stop_reason) == ([21, 22, 23], "length")
    (zero,) = {body["model"] for body in recorded("/v1/completions")}
    assert re.fullmatch(r"base-[0-9a-f]+-\d+", zero)  # ZERO_ADAPTER represents the base model on a CPU


def test_topk_drops_the_sampled_token(engine: ClusterEngine, wait: Any):
    (sequence,) = wait(engine.sample(sample_request([10, 20], max_tokens=2, topk_sample_logprobs=3))).sequences
    assert sequence.topk is not None
    assert sequence.topk.token_ids.tolist() == [[2, 1, 0], [2, 1, 0]]
    np.testing.assert_allclose(sequence.topk.logprobs[0], [2.79, 1.79, 0.79], atol=1e-6)


def test_deltas_add_up_to_the_sequences(engine: ClusterEngine, wait: Any, recorded: Any):
    deltas: list[Any] = []
    request = sample_request([10, 20], num_samples=2, max_tokens=5, topk_sample_logprobs=1)
    sampled = wait(engine.sample(request, deltas.append))
    assert recorded("/v1/completions")[0]["stream"]
    assert len(deltas) == 6
    for number, sequence in enumerate(sampled.sequences):
        own = [delta for delta in deltas if delta.sample == number]
        assert [token for delta in own for token in delta.tokens] == sequence.tokens.tolist()
        np.testing.assert_allclose(
            [sequence for delta in own for sequence in delta.logprobs], sequence.logprobs, atol=1e-6
        )
        np.testing.assert_array_equal(np.concatenate([delta.topk.token_ids for delta in own]), sequence.topk.token_ids)


def test_greedy_samples_are_drawn_once_and_copied(engine: ClusterEngine, wait: Any, recorded: Any):
    deltas: list[Any] = []
    sampled = wait(engine.sample(sample_request([10, 20], temperature=0, num_samples=3, max_tokens=2), deltas.append))
    assert recorded("/v1/completions")[0]["n"] == 1
    assert [sequence.tokens.tolist() for sequence in sampled.sequences] == [[21, 22]] * 3
    assert sorted(delta.sample for delta in deltas) == [0, 1, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.5},
        {"max_tokens": 1, "prompt_logprobs": True},
        {"prompt": np.arange(1020) % 512, "max_tokens": 5},
    ],
    ids=["top_k", "top_p", "one token and the prompt", "the context's last token"],
)
def test_torch_engine_samples_what_vllm_cannot(
    engine: ClusterEngine, version: str, wait: Any, recorded: Any, settings: dict[str, Any]
):
    request = sample_request(version=version, **settings)
    assert_same_samples(wait(engine.sample(request)), wait(engine.trainer.leader.sample(request)))
    assert recorded("/v1/completions") == []


def test_top_k_is_ignored_for_greedy_samples(engine: ClusterEngine, wait: Any, recorded: Any):
    wait(engine.sample(sample_request(temperature=0, top_k=5)))
    assert "top_k" not in recorded("/v1/completions")[0]


def test_torch_engine_answers_prompt_questions(engine: ClusterEngine, version: str, wait: Any, recorded: Any):
    about = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2}
    request = sample_request(version=version, num_samples=2, **about)
    result, expected = wait(engine.sample(request)), wait(engine.trainer.leader.sample(request))
    np.testing.assert_array_equal(result.prompt_logprobs, expected.prompt_logprobs)
    np.testing.assert_array_equal(result.topk_prompt.token_ids, expected.topk_prompt.token_ids)
    np.testing.assert_array_equal(result.prompt_alt.token_ids, expected.prompt_alt.token_ids)
    assert result.sequences[0].tokens[0] == PROMPT[-1] + 1
    assert [body["n"] for body in recorded("/v1/completions")] == [2]


def test_version_is_loaded_once_and_unloaded(
    engine: ClusterEngine, version: str, wait: Any, recorded: Any, tmp_path: Path
):
    for _ in range(2):
        wait(engine.sample(sample_request(version=version)))
    (loaded,) = recorded("/v1/load_lora_adapter")
    assert {body["model"] for body in recorded("/v1/completions")} == {loaded["lora_name"]}
    shutil.rmtree(tmp_path / "kept")
    wait(engine.sample(sample_request(version=version)))
    wait(engine.detach(version))
    assert recorded("/v1/unload_lora_adapter") == [{"lora_name": loaded["lora_name"]}]
    assert not Path(loaded["lora_path"]).exists()
    with pytest.raises(Gone, match="version"):
        wait(engine.sample(sample_request(version=version)))


def test_captured_version_is_sampled_on_the_trainer(engine: ClusterEngine, wait: Any, model_id: str):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.capture(model_id, "unwritten"))
    wait(engine.sample(sample_request(version="unwritten", top_k=5)))
    wait(engine.detach("unwritten"))
    wait(engine.drop(model_id))


def test_attached_version_is_linked_from_its_checkpoint(
    engine: ClusterEngine, version: str, wait: Any, recorded: Any, tmp_path: Path
):
    for copy in ("first", "second"):  # a replaced version must not get the name of the old one
        shutil.copytree(tmp_path / "kept", tmp_path / copy)
        wait(engine.attach("again", tmp_path / copy))
        wait(engine.sample(sample_request(version="again")))
    used = [body["model"] for body in recorded("/v1/completions")]
    loaded = [body["lora_name"] for body in recorded("/v1/load_lora_adapter")]
    assert len(set(used)) == 2
    assert set(used) <= set(loaded)
    assert len(set(loaded)) == len(loaded)
    assert recorded("/v1/unload_lora_adapter") == [{"lora_name": used[0]}]
    wait(engine.detach("again"))
    wait(engine.attach("deleted", tmp_path / "kept"))
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(Gone, match="no longer there"):
        wait(engine.sample(sample_request(version="deleted")))
    wait(engine.detach("deleted"))


def test_scales_of_modules_are_in_the_matrices(
    engine: ClusterEngine, tiny_llama: Path, wait: Any, recorded: Any, tmp_path: Path
):
    """vLLM applies lora_alpha / r to all modules, whatever alpha_pattern says."""
    settings: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}
    adapter = write_peft(tiny_llama, tmp_path / "peft", r=8, lora_alpha=16, **settings)
    wait(engine.trainer.leader.fork("scales", adapter, optimizer=False))
    wait(engine.save("scales", tmp_path / "saved", optimizer=False))
    wait(engine.attach("scales", tmp_path / "saved"))
    wait(engine.sample(sample_request(version="scales")))
    (loaded,) = recorded("/v1/load_lora_adapter")
    read, saved = (
        load_file(Path(folder) / "adapter_model.safetensors") for folder in (loaded["lora_path"], tmp_path / "saved")
    )
    config = json.loads((Path(loaded["lora_path"]) / "adapter_config.json").read_text())
    assert read.keys() == saved.keys()
    for name, matrix in saved.items():
        scale = 16 / (2 if "v_proj" in name else 8)
        factor = scale / (config["lora_alpha"] / config["r"]) if "lora_B" in name else 1
        np.testing.assert_allclose(read[name], factor * matrix, rtol=1e-6)
    wait(engine.detach("scales"))


def test_rank_above_the_limit_is_unsupported(engine: ClusterEngine, wait: Any, tmp_path: Path, recorded: Any):
    with pytest.raises(Unsupported, match=r"vllm\.rank=16"):
        wait(engine.create("wide", LoraSpec(rank=16, seed=1)))
    wait(engine.trainer.leader.create("wide", LoraSpec(rank=16, seed=1)))
    wait(engine.save("wide", tmp_path / "wide", optimizer=False))
    wait(engine.attach("wide", tmp_path / "wide"))
    for _ in range(2):
        with pytest.raises(Unsupported, match="rank 16"):
            wait(engine.sample(sample_request(version="wide")))
    assert recorded("/v1/load_lora_adapter") == []
    wait(engine.detach("wide"))


def test_cancelled_request_closes_its_connection(engine: ClusterEngine, version: str, wait: Any, recorded: Any):
    async def cancel() -> None:
        request = sample_request((vllm_stub.SLOW, 1), version=version)
        waiting = asyncio.create_task(engine.sample(request))
        await until(lambda: bool(recorded("/v1/completions")))
        await engine.cancel(request.request_id)
        with pytest.raises(Gone, match="cancelled"):
            await waiting
        abandoned = asyncio.create_task(engine.sample(sample_request((vllm_stub.SLOW, 1), version=version)))
        await until(lambda: len(recorded("/v1/completions")) == 2)
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        await until(lambda: len(recorded("closed")) == 2)

    wait(asyncio.wait_for(cancel(), 240))


def is_stub(process: psutil.Process, record: Path) -> bool:
    return {vllm_stub.__file__, str(record)} <= set(process.info["cmdline"] or ())


def test_vllm_is_restarted_when_it_dies(
    cluster: ModelCluster, engine: ClusterEngine, folder: Path, version: str, wait: Any, recorded: Any
):
    """A request without results so far waits for the new one. To break it: let `worker._exit` do nothing."""

    def slow() -> int:
        return sum(body["prompt"][0] == vllm_stub.SLOW for body in recorded("/v1/completions"))

    async def end() -> None:
        assert cluster.pool is not None
        request = sample_request((vllm_stub.SLOW, 1), version=version)
        waiting = asyncio.create_task(engine.sample(request))
        await until(lambda: slow() == 1)
        (vllm,) = (process for process in psutil.process_iter(["cmdline"]) if is_stub(process, folder / "record"))
        vllm.kill()
        await until(lambda: slow() == 2)
        assert not vllm.is_running()
        await engine.cancel(request.request_id)
        with pytest.raises(Gone):
            await waiting
        (sequence,) = (await engine.sample(sample_request([10, 20], version=version, max_tokens=1))).sequences
        assert sequence.tokens.tolist() == [21]
        assert cluster.pool.status()[0].starts == 2

    wait(asyncio.wait_for(end(), 240))
    before, after = recorded("/v1/load_lora_adapter")[::2]  # and the one for the base model
    assert before["lora_name"] != after["lora_name"]


def test_torch_engine_trains(engine: ClusterEngine, wait: Any, tmp_path: Path, model_id: str):
    from tests.engine.data import pass_for

    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    (result,) = wait(engine.run([pass_for("ppo", model_id)]))
    assert result.metrics["loss:sum"] != 0
    assert wait(engine.step(model_id, AdamParams()))["grad_norm"] > 0
    assert wait(engine.save(model_id, tmp_path / "state", optimizer=True)) > 0
    wait(engine.load(model_id, tmp_path / "state", optimizer=True))
    wait(engine.drop(model_id))


def test_missing_vllm_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no .venv-vllm/bin/python or a `vllm` on PATH.*make vllm"):
        find_python(VllmConfig())
    with pytest.raises(ConfigError, match="nowhere"):
        find_python(VllmConfig(python=tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no vLLM"):
        find_python(VllmConfig(python=Path(sys.executable)))


def test_find_python_looks_in_venv_and_next_to_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("python", "vllm"):
        shutil.copy(python, tmp_path / "bin" / name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert find_python(VllmConfig()) == tmp_path / "bin" / "python"
    (tmp_path / ".venv-vllm").mkdir()
    shutil.copytree(tmp_path / "bin", tmp_path / ".venv-vllm" / "bin")
    assert find_python(VllmConfig()) == tmp_path / ".venv-vllm" / "bin" / "python"


def test_failed_start_quotes_the_log_of_vllm(tiny_llama: Path, python: Path, tmp_path: Path, wait: Any):
    """The error that came first, though it is not in the last lines."""
    expected = (
        r"(?s)exit 1\): ValueError: no memory for the cache \(5 GiB\)\.\n.*core initialization failed.*vllm\.memory"
    )
    with pytest.raises(EngineError, match=expected):
        wait(cluster_of(tiny_llama, tmp_path, VllmConfig(python=python, args=("--fail",))).start())


class Other(BaseHTTPRequestHandler):
    """Another program that answers on the port: to every path like a vLLM with other models."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "base"}, {"id": "base-0"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "another vLLM"])
def test_start_with_a_taken_port_takes_another(
    python: Path, tmp_path: Path, wait: Any, monkeypatch: pytest.MonkeyPatch, answers: bool
):
    """To break it: let `VllmServer.start` await `_start` alone, or leave out `_check_name`."""
    ports: list[int] = []
    other = socket.socket()

    def command(python: Path, config: VllmConfig, card: ModelCard, port: int, name: str) -> list[str]:
        if not ports:
            other.bind(("127.0.0.1", port))
            if answers:
                other.listen()
                program.socket = other
                Thread(target=program.serve_forever, args=(0.05,)).start()
        ports.append(port)
        return command_of(python, config, card, port, name)

    monkeypatch.setattr(server, "command_of", command)
    monkeypatch.setattr(supervisor, "FIRST_RETRY_S", 0.0)
    settings = VllmConfig(python=python, args=("--record", str(tmp_path / "record")))
    vllm = VllmServer(settings, CARD, 1, tmp_path)
    with other, ThreadingHTTPServer(("127.0.0.1", 0), Other, bind_and_activate=False) as program:
        program.socket.close()
        wait(vllm.start())
        if answers:
            program.shutdown()
    wait(vllm.close())
    assert len(ports) == len(set(ports)) == 2
    assert vllm.url.endswith(f":{ports[1]}")


@pytest.mark.parametrize("modules", [("gate_proj", "up_proj"), ("experts.w1", "experts.w2")])
def test_mixture_on_a_cpu_is_refused(modules: tuple[str, ...], tmp_path: Path, wait: Any):
    """To break it: leave out `check_model` in `VllmServer.start`."""
    card = replace(CARD, adapted_modules={"mlp": modules})
    error = Unsupported if "experts.w1" in modules else ConfigError
    with pytest.raises(error, match="mixture of experts" if error is Unsupported else "nowhere"):
        wait(VllmServer(VllmConfig(python=tmp_path / "nowhere"), card, 1, tmp_path).start())


def test_settings_reach_the_command_and_environment(monkeypatch: pytest.MonkeyPatch):
    settings = VllmConfig(rank=64, adapters=40, memory=0.5, devices="1,2", args=("--tensor-parallel-size", "2"))
    command = command_of(Path("/venv/bin/python"), settings, CARD, 1234, "m")
    for pair in (
        ("--max-lora-rank", "64"), ("--max-loras", "41"), ("--max-cpu-loras", "41"), ("--port", "1234"),
        ("--gpu-memory-utilization", "0.5"), ("--max-model-len", "64"), ("--dtype", "bfloat16"), ("--model", "/here"),
        ("--served-model-name", "m"),
        ("--max-num-batched-tokens", "2048"),
        ("--tensor-parallel-size", "2"), ("--generation-config", "vllm"), ("--logprobs-mode", "processed_logprobs"),
    ):  # fmt: skip
        assert command[command.index(pair[0]) + 1] == pair[1]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    result = environment_of(settings, CARD, 3)
    assert result["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert result["OMP_NUM_THREADS"] == "3"
    assert result["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "PYTHONPATH" not in result
    assert result["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"
    assert int(result["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) > 3600
    assert "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" not in environment_of(settings, replace(CARD, device="cuda"), 3)


def test_plan_of_a_gpu_reaches_the_command():
    """vLLM ends at start if its cache does not hold one row of `--max-model-len`."""
    share = VllmPlan(weights=1, adapters=2, working=3, cache=4096, cache_tokens=48, context=48, share=0.41234)
    plan = MemoryPlan(
        gpu=Gpu(name="a GPU", total_bytes=100, free_bytes=100), facts=FACTS,
        available=100, reserve=0, weights=0, stacks=0, slots=0, decoded=0,
        activations=0, cache=0, models=0, pass_tokens=1, cache_tokens=1, vllm=share,
    )  # fmt: skip
    card = replace(CARD, device="cuda:0", memory=plan, vllm_context=48)
    command = command_of(Path("python"), VllmConfig(), card, 1, "m")
    for pair in (
        ("--gpu-memory-utilization", "0.413"), ("--kv-cache-memory-bytes", "4096"), ("--max-model-len", "48"),
    ):  # fmt: skip
        assert command[command.index(pair[0]) + 1] == pair[1]
    for settings, device, expected in (
        (VllmConfig(memory=0.6), card, "0.6"),
        (VllmConfig(), replace(card, memory=replace(plan, vllm=None)), "0.9"),
        (VllmConfig(), CARD, "0.3"),
    ):
        command = command_of(Path("python"), settings, device, 1, "m")
        assert command[command.index("--gpu-memory-utilization") + 1] == expected
        assert "--kv-cache-memory-bytes" not in command


def test_rows_beyond_the_context_of_vllm_are_the_trainers():
    card = replace(CARD, vllm_context=48)
    for max_tokens, supported in ((8, True), (46, False), (None, False)):
        request = replace(sample_request(), prompt=np.arange(3, dtype=np.int32), max_tokens=max_tokens)
        assert client.is_supported(request, card) == supported
        assert client.is_supported(request, CARD)


def test_incomplete_or_aborted_sequences_raise():
    parser = client.CompletionParser(sample_request(num_samples=2))
    result = {"token_logprobs": [-1.0], "top_logprobs": [{}]}
    parser.add({"choices": [{"index": 0, "finish_reason": "stop", "token_ids": [1], "logprobs": result}]})
    with pytest.raises(EngineDied, match="closed the connection"):
        parser.result()
    with pytest.raises(EngineDied, match="abort"):
        parser.add({"choices": [{"index": 1, "finish_reason": "abort", "token_ids": [], "logprobs": None}]})


def test_build_rejects_vllm():
    with pytest.raises(ConfigError, match="ModelCluster"):
        build(EngineConfig(sampler="vllm"))
