"""One script for every SDK from 0.23 on: `python script.py URL KEY`, with that SDK importable.

Prints outcomes by step as JSON: "ok" or the first line of the error. Steps that the SDK does not have are left out. The
script imports nothing of Tinsmith, because it runs in a venv with only the SDK and its dependencies.
"""

from __future__ import annotations

import concurrent.futures
import io
import json
import logging
import sys
import tarfile
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

TIMEOUT_S = 60


def settled(made: Any) -> Any:
    """The result of a call; older SDKs return clients where newer ones return futures of clients."""
    waits = (tinker.APIFuture, concurrent.futures.Future)
    return made.result(TIMEOUT_S) if isinstance(made, waits) else made


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


DATA = [datum([5, 6, 7, 8]), datum([9, 10, 11])]
PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=4, seed=7, temperature=1.0)


class Script:
    """The steps, in order; a step may use results of earlier steps."""

    def __init__(self, url: str, key: str) -> None:
        self.client = tinker.ServiceClient(base_url=url, api_key=key)
        self.outcomes: dict[str, str] = {}
        self.model: Any = None
        self.path = ""

    def step(self, name: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - any error is the outcome of the step
            self.outcomes[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            self.outcomes[name] = "ok"

    def loss(self, model: Any) -> float:
        return settled(model.forward(DATA, "cross_entropy")).metrics["loss:sum"]

    def capabilities(self) -> None:
        assert "tiny" in [model.model_name for model in self.client.get_server_capabilities().supported_models]

    def create(self) -> None:
        self.model = settled(self.client.create_lora_training_client("tiny", rank=4, seed=1))
        assert self.model.get_info().model_data.model_name == "tiny"

    def train(self) -> None:
        before = self.loss(self.model)
        for _ in range(2):
            settled(self.model.forward_backward(DATA, "cross_entropy"))
            settled(self.model.optim_step(types.AdamParams(learning_rate=0.02)))
        assert self.loss(self.model) < before

    def reinforce(self) -> None:
        rl = datum([5, 6, 7, 8], logprobs=[-1.0] * 3, advantages=[1.0] * 3)
        rl.loss_fn_inputs.pop("weights")
        for loss_fn in ("importance_sampling", "ppo"):
            assert len(settled(self.model.forward_backward([rl], loss_fn)).loss_fn_outputs) == 1
        settled(self.model.optim_step(types.AdamParams()))

    def custom(self) -> None:
        def loss(_data: Any, logprobs: Any) -> Any:
            return sum((entry**2).sum() for entry in logprobs), {"mine": 1.0}

        assert settled(self.model.forward_backward_custom(DATA, loss)).metrics
        settled(self.model.optim_step(types.AdamParams()))

    def save(self) -> None:
        self.path = settled(self.model.save_state("state")).path
        assert self.path.startswith("tinker://")

    def sample(self) -> None:
        path = settled(self.model.save_weights_for_sampler("sampler")).path
        sampler = settled(self.client.create_sampling_client(model_path=path))
        assert len(settled(sampler.sample(PROMPT, 2, PARAMS)).sequences) == 2
        assert settled(sampler.compute_logprobs(PROMPT))[0] is None

    def snapshot(self) -> None:
        sampler = settled(self.model.save_weights_and_get_sampling_client("unnamed"))
        assert settled(sampler.sample(PROMPT, 1, PARAMS)).sequences[0].tokens

    def resume(self) -> None:
        made = settled(self.client.create_training_client_from_state(self.path))
        assert abs(self.loss(made) - self.loss(self.model)) < 1e-4

    def resume_with_optimizer(self) -> None:
        made = settled(self.client.create_training_client_from_state_with_optimizer(self.path))
        for item in (made, self.model):
            settled(item.forward_backward(DATA, "cross_entropy"))
            settled(item.optim_step(types.AdamParams(learning_rate=0.02)))
        assert abs(self.loss(made) - self.loss(self.model)) < 1e-3

    def load(self) -> None:
        made = settled(self.client.create_lora_training_client("tiny", rank=4, seed=2))
        settled(made.load_state(self.path))
        saved = self.loss(made)
        settled(made.forward_backward(DATA, "cross_entropy"))
        settled(made.optim_step(types.AdamParams(learning_rate=0.02)))
        assert self.loss(made) < saved
        settled(made.load_state_with_optimizer(self.path))  # into a model that was trained
        assert abs(self.loss(made) - saved) < 1e-4

    def manage(self) -> None:
        rest = self.client.create_rest_client()
        run = self.path.split("/")[2]
        assert settled(rest.get_training_run(run)).lora_rank == 4
        assert settled(rest.get_weights_info_by_tinker_path(self.path)).base_model == "tiny"
        settled(rest.publish_checkpoint_from_tinker_path(self.path))
        settled(rest.unpublish_checkpoint_from_tinker_path(self.path))
        assert self.path in [checkpoint.tinker_path for checkpoint in settled(rest.list_user_checkpoints()).checkpoints]
        assert run in [run.training_run_id for run in settled(rest.list_training_runs()).training_runs]
        settled(rest.delete_checkpoint_from_tinker_path(self.path))

    def archive(self) -> None:
        """SDKs before 0.36 download a checkpoint as one file."""
        rest = self.client.create_rest_client()
        url = settled(rest.get_checkpoint_archive_url_from_tinker_path(self.path)).url
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content = response.read()
            assert len(content) == int(response.headers["Content-Length"])
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            names = set(tar.getnames())
        assert names >= {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}, names

    def unload(self) -> None:
        """SDKs before 0.26 have unload_model in their internal client only."""
        from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

        model_id, holder = self.model.get_info().model_id, self.client.holder

        async def ask() -> Any:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as inner:
                return await inner.models.unload(request=types.UnloadModelRequest(model_id=model_id))

        promise = settled(holder.run_coroutine_threadsafe(ask()))
        assert promise.request_id

    def finish(self) -> None:
        settled(self.client.close("success"))

    def run(self) -> dict[str, str]:
        steps = {
            "capabilities": self.capabilities, "create": self.create, "train": self.train, "RL losses": self.reinforce,
            "custom loss": self.custom, "save": self.save, "sample": self.sample, "sample unnamed": self.snapshot,
            "resume": self.resume, "resume with optimizer": self.resume_with_optimizer, "load": self.load,
        }  # fmt: skip
        for name, run in steps.items():
            self.step(name, run)
        if "get_checkpoint_archive_url_from_tinker_path" in dir(self.client.create_rest_client()):
            self.step("archive", self.archive)
        self.step("manage checkpoints", self.manage)
        if "unload" in dir(tinker.resources.AsyncModelsResource):
            self.step("unload", self.unload)
        if "close" in dir(self.client):
            self.step("finish", self.finish)
        return self.outcomes


if __name__ == "__main__":
    assert str(tinker.__file__).startswith(sys.prefix), "the SDK is not the one of this venv"
    print(json.dumps(Script(*sys.argv[1:]).run()), flush=True)
