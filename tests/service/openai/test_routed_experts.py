"""Routed experts in answers of /inference/v1/generate: those of the model, in the form that verifiers reads."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.architectures import save_tiny
from tests.models import save_tokenizer
from tests.service.sdk.test_images import Engines, torch_api
from tests.service.support.inprocess import Factory, api

PROMPT = [5, 9, 17, 3, 8]


def body(**params: Any) -> dict[str, Any]:
    settings = {"max_tokens": 4, "temperature": 0, "n": 2, "ignore_eos": True, **params}
    return {"model": "toy", "token_ids": PROMPT, "sampling_params": settings}


def own_experts(folder: Path, tokens: list[int]) -> np.ndarray:
    """The experts [N, layers, k] that transformers' model chooses."""
    plain, seen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), list[Tensor]()
    for module in plain.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2]))
    with torch.no_grad():
        plain(torch.tensor([tokens]))
    return np.sort(torch.stack(seen, 1).numpy(), 2)


def test_generate_returns_the_experts_of_its_tokens(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe", tmp_path / "model", num_hidden_layers=2)
    save_tokenizer(folder)

    async def main() -> None:
        async with torch_api(tmp_path / "data", folder, Engines()) as app:
            for start in (0, 3):
                params = {"return_routed_experts": True, "routed_experts_prompt_start": start}
                answer = await app.send("POST", "/inference/v1/generate", body(**params))
                assert answer.status_code == 200, answer.text
                assert '"routed_experts":{"data":"' in answer.text  # how clients find the data in large answers
                for choice in answer.json()["choices"]:
                    payload = choice["routed_experts"]
                    record = np.frombuffer(base64.b64decode(payload["data"]), payload["dtype"])
                    expected = own_experts(folder, [*PROMPT, *choice["token_ids"][:-1]])[start:]
                    assert payload["start"] == start
                    assert (np.sort(record.reshape(payload["shape"]), 2) == expected).all()
            plain = await app.send("POST", "/inference/v1/generate", body())
            assert "routed_experts" not in plain.json()["choices"][0]
            chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "return_routed_experts": True}
            refused = await app.send("POST", "/v1/chat/completions", chat)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_routed_experts")
            assert "/inference/v1/generate" in refused.text

    asyncio.run(main())


def test_dense_models_refuse_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, Factory()) as app:
            refused = await app.send("POST", "/inference/v1/generate", body(return_routed_experts=True))
            assert refused.status_code == 400
            assert "records no routed experts: it is not a mixture of experts" in refused.text

    asyncio.run(main())
