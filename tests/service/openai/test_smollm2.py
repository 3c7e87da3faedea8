"""SmolLM2 through the openai client: text of transformers' greedy generate, logprobs of the Tinker SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.service.conftest import Served
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.slow

MAX_QUERY_IDS: tuple[list[Any], ...] = (
    [{"role": "user", "content": "What is 39 + 13?"}],
    [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Say hello 😀, name a colour."}],
)


@pytest.fixture(scope="module")
def served_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("smollm2")
    with embedded(ServeConfig(models=(f"smol={smollm2}",), dtype="float32", data=data)) as (url, key):
        yield Served(url, key, data)


def test_greedy_chat_equals_transformers(served_smollm2: Served, smollm2: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with openai.OpenAI(base_url=f"{served_smollm2.url}/v1", api_key=served_smollm2.key) as ai:
        for messages in MAX_QUERY_IDS:
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            length = inputs["input_ids"].shape[1]
            written = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, length:]
            wanted = tokenizer.decode(written, skip_special_tokens=True)
            options: dict[str, Any] = {"model": "smol", "messages": messages, "max_tokens": 40, "temperature": 0}
            assert ai.chat.completions.create(**options).choices[0].message.content == wanted
            chunks = ai.chat.completions.create(**options, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted


def test_logprobs_equal_the_tinker_sdk(served_smollm2: Served):
    service = tinker.ServiceClient(base_url=served_smollm2.url, api_key=served_smollm2.key)
    sampler = service.create_sampling_client(base_model="smol").result()
    with openai.OpenAI(base_url=f"{served_smollm2.url}/v1", api_key=served_smollm2.key) as ai:
        said = ai.chat.completions.create(
            model="smol",
            messages=MAX_QUERY_IDS[0],
            max_tokens=20,
            temperature=0.8,
            seed=11,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
    (choice,) = said.choices
    prompt = types.ModelInput.from_ints(said.model_extra["prompt_token_ids"])  # type: ignore[index]
    params = types.SamplingParams(max_tokens=20, temperature=0.8, seed=11)
    (theirs,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
    assert choice.model_extra["token_ids"] == theirs.tokens  # type: ignore[index]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    np.testing.assert_allclose([entry.logprob for entry in choice.logprobs.content], theirs.logprobs, atol=1e-4)
    service.close("success").result()
