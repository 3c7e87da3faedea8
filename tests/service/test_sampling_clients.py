"""Copied and inflight sampling clients of the unmodified SDK, also across a crash of the server."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.service.conftest import Served, datum
from tests.service.support.process import child, free_port
from tinsmith.service.config import ServeConfig

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

TOKENS = [5, 6, 7, 8, 9]
PROMPT = types.ModelInput.from_ints(TOKENS)
ADAM = types.AdamParams(learning_rate=0.05)


def step(train: tinker.TrainingClient) -> None:
    passed = train.forward_backward([datum(TOKENS, weights=[1.0] * 4)], "cross_entropy")
    stepped = train.optim_step(ADAM)
    passed.result()
    stepped.result()


def logprobs(sampler: tinker.SamplingClient) -> list[float | None]:
    return sampler.compute_logprobs(PROMPT).result()


def numbers(samplers: list[tinker.SamplingClient]) -> list[int]:
    """Numbers of the clients within their session, read from the ids of their samples."""
    result = []
    for sampler in samplers:
        [sequence] = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result().sequences
        result.append(int(sequence.sequence_id.split(":")[-2]) // 10**9)
    return result


def test_copies_of_a_client_get_distinct_numbers(client: tinker.ServiceClient) -> None:
    original = client.create_sampling_client(base_model="toy").result()
    copies = [pickle.loads(pickle.dumps(original)) for _ in range(3)]
    assert numbers([original, *copies]) == [0, 1, 2, 3]
    assert {tuple(logprobs(copy)[1:]) for copy in [original, *copies]} == {tuple(logprobs(original)[1:])}


def test_client_numbers_are_not_reused_after_a_restart(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x")
    with child(config) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key="tml-x")
        original = client.create_sampling_client(base_model="toy").result()
        assert numbers([pickle.loads(pickle.dumps(original)) for _ in range(2)]) == [1, 2]
        first.kill()
    with child(config):
        handle = original.get_sampler_handle()
        copy = tinker.SamplingClient.from_sampler_handle(handle, api_key="tml-x")
        assert numbers([copy, original]) == [3, 0]


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_inflight_clients_share_the_newest_saved_weights(train: tinker.TrainingClient) -> None:
    step(train)
    still = train.save_weights_and_get_sampling_client().result()
    first = train.save_weights_and_get_sampling_client(kind="inflight").result()
    early = logprobs(first)
    assert logprobs(still) == early
    step(train)
    assert logprobs(first) == early  # a step does not change sampling weights; a save does
    second = train.save_weights_and_get_sampling_client(kind="inflight").result()
    later = logprobs(second)
    assert sum(later[1:]) > sum(early[1:])
    assert logprobs(first) == later
    assert logprobs(pickle.loads(pickle.dumps(first))) == later
    assert logprobs(still) == early
    assert first._sampling_session_id != second._sampling_session_id


def test_only_the_newest_inflight_weights_are_kept(
    served: Served, client: tinker.ServiceClient, train: tinker.TrainingClient
) -> None:
    def folders() -> set[str]:
        return {folder.name for folder in (served.data / "checkpoints").iterdir()}

    before = folders()
    samplers = []
    for _ in range(4):
        step(train)
        samplers.append(train.save_weights_and_get_sampling_client(kind="inflight").result())
    expected = logprobs(samplers[-1])
    assert all(logprobs(sampler) == expected for sampler in samplers)
    train.save_state("settled").result()  # background writes have ended
    assert len(folders() - before) <= 2


def test_inflight_weights_survive_a_crash(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x")
    with child(config) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key="tml-x")
        train = client.create_lora_training_client("toy", rank=4, seed=1).result()
        samplers = []
        for _ in range(2):
            step(train)
            samplers.append(train.save_weights_and_get_sampling_client(kind="inflight").result())
        expected = logprobs(samplers[0])
        first.kill()
    with child(config):
        assert [logprobs(sampler) for sampler in samplers] == [expected] * 2
        step(train)
        newer = train.save_weights_and_get_sampling_client(kind="inflight").result()
        assert logprobs(samplers[0]) == logprobs(newer) != expected


def test_crash_during_many_samples_loses_none(tmp_path: Path) -> None:
    """At the crash some samples are fetched, some done and some running, for two clients of a session."""
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x")
    params = types.SamplingParams(max_tokens=3, stop=[])
    with child(config, delay=0.4) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key="tml-x")
        original = client.create_sampling_client(base_model="toy").result()
        clients = [original, pickle.loads(pickle.dumps(original))]
        futures = []
        for number in range(3):
            if number == 2:
                first.hold()
            futures += [sampler.sample(PROMPT, 2, params).future() for sampler in clients for _ in range(10)]
            time.sleep(0.2)
        first.until_held()
        first.kill()
        ended = sum(future.done() for future in futures)
    with child(config):
        responses = [future.result(240) for future in futures]
    assert ended < len(futures)
    sequences = [sequence for response in responses for sequence in response.sequences]
    assert all(len(sequence.tokens) == 3 for sequence in sequences)
    assert len({sequence.sequence_id for sequence in sequences}) == 2 * len(futures)
