"""Logprobs of given tokens and of the likeliest tokens, against transformers in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.rl.scripted_run import REPLIES
from tinsmith.errors import Unsupported
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.testing import ScriptedSnapshot

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

TOKENS = [1, 40, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and key of a service with the torch engine."""
    config = ServeConfig(models=(f"tiny={tiny_llama}",), data=tmp_path_factory.mktemp("served"), dtype="float32")
    with embedded(config) as address:
        yield address


def test_next_token_logprobs_equal_transformers(served, tiny_llama):
    import torch
    from transformers import AutoModelForCausalLM

    async def main():
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *served, seed=1)
        snapshot = await policy.snapshot()
        answers = (  # texts that are scored first: the others are cached, and this model's products round by their rows
            await snapshot.logprobs(TOKENS),
            await snapshot.logprobs(TOKENS, last=2),
            await snapshot.next_logprobs(TOKENS, [3, 500, 3]),
            await snapshot.top_logprobs(TOKENS, 5),
            await snapshot.top_logprobs(TOKENS, 10_000),
        )
        await policy.models.close()
        return answers

    logprobs, last, chosen, (ids, top), (all_ids, everything) = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1).numpy()
    np.testing.assert_allclose(chosen, expected[-1][[3, 500, 3]], atol=1e-5)
    assert ids.tolist() == np.argsort(-expected[-1])[:5].tolist()
    np.testing.assert_allclose(top, expected[-1][ids], atol=1e-5)
    assert sorted(all_ids) == list(range(512))
    np.testing.assert_allclose(np.exp(everything.astype(np.float64)).sum(), 1.0, atol=1e-5)
    np.testing.assert_allclose(logprobs, expected[range(5), TOKENS[1:]], atol=1e-5)
    np.testing.assert_array_equal(last, logprobs[-2:])


@pytest.mark.parametrize("method", ["next_logprobs", "top_logprobs"])
def test_fields_that_a_server_leaves_out_are_named(served, monkeypatch, method):
    send = tinker.SamplingClient.sample

    def without(client: Any, *args: Any, **options: Any) -> Any:
        options.pop("target_prompt_logprobs", None)
        options.pop("topk_sample_logprobs", None)
        return send(client, *args, **options)

    monkeypatch.setattr(tinker.SamplingClient, "sample", without)

    async def main() -> None:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *served, seed=1)
        snapshot = await policy.snapshot()
        try:
            await (
                snapshot.next_logprobs(TOKENS, [3]) if method == "next_logprobs" else snapshot.top_logprobs(TOKENS, 3)
            )
        finally:
            await policy.models.close()

    with pytest.raises(Unsupported, match=r"accepts (target_prompt|topk_sample)_logprobs and returns none"):
        asyncio.run(main())


def test_scripted_policy_begins_its_replies():
    snapshot = ScriptedSnapshot(("no", "yes", "nothing"), np.log([0.2, 0.5, 0.3]), 0)
    ids, top = asyncio.run(snapshot.top_logprobs([5], 9))
    chosen = asyncio.run(snapshot.next_logprobs([5], [ord("y"), ord("z")]))
    assert sorted(map(chr, ids)) == ["n", "y"]
    np.testing.assert_allclose(np.exp(top), [0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(np.exp(chosen), [0.5, 0.0], rtol=1e-6)


def test_pinned_snapshot_keeps_its_version():
    version = 1
    live = Snapshot.following(lambda: ScriptedSnapshot(REPLIES, np.zeros(3), version))
    pinned = live.pinned()
    version = 2
    assert (live.version, pinned.version, pinned.pinned().version) == (2, 1, 1)
