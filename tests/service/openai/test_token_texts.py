"""Texts, logprobs and offsets of the OpenAI API with tokenizers of every kind, whole and streamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.models import CHATML
from tests.service.conftest import Served
from tests.tokenizers import save
from tinsmith.chat.detokenizer import REPLACEMENT
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

KINDS = ("byte_level", "llama2", "gemma", "t5")


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in KINDS:
        made[kind] = tmp_path_factory.mktemp(kind) / "model"
        shutil.copytree(tiny_llama, made[kind])
        save(kind, made[kind], CHATML)
    return made


@pytest.fixture(scope="module")
def served(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("served")
    models = tuple(f"{kind}={folder}" for kind, folder in folders.items())
    with embedded(ServeConfig(models=models, engine="fake", data=data)) as (url, key):
        yield Served(url, key, data)


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", headers={"X-API-Key": served.key}, json=body, timeout=120)


def complete(served: Served, **body: Any) -> dict[str, Any]:
    """The choice of a completion, equal to the one that a stream adds up to."""
    whole = post(served, "completions", **body).json()["choices"][0]
    text, tokens, offsets = "", [], []
    for line in post(served, "completions", **body, stream=True).text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["text"]
            tokens += (choice["logprobs"] or {}).get("tokens", [])
            offsets += (choice["logprobs"] or {}).get("text_offset", [])
    assert (text, tokens, offsets) == (whole["text"], whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"])
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_any_tokens_is_that_of_decode(served: Served, folders: dict[str, Path], kind: str):
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    for seed in range(5):
        body: dict[str, Any] = {"model": kind, "prompt": [1, 5], "max_tokens": 40, "seed": seed, "ignore_eos": True}
        choice = complete(served, **body, logprobs=0, stop=["nothing like this"], return_token_ids=True)
        ids, places = choice["token_ids"], choice["logprobs"]["text_offset"]
        assert len(ids) == 40
        assert choice["text"] == tokenizer.decode(ids, skip_special_tokens=True)
        has_broken = REPLACEMENT in choice["text"]
        for token, at in zip(choice["logprobs"]["tokens"], places, strict=True):
            if not has_broken and at and token not in ("<s>", "</s>", "<unk>") and "bytes:" not in token:
                assert choice["text"].startswith(token, at)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_distinct_tokens_stay_apart(served: Served, kind: str):
    for count in (0, 5, 100, 300):
        body: dict[str, Any] = {"model": kind, "prompt": "the", "max_tokens": 2, "temperature": 0, "logprobs": count}
        named = post(served, "completions", **body).json()["choices"][0]["logprobs"]
        ids = post(served, "completions", **body, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
        for tops, tops_by_id, token in zip(named["top_logprobs"], ids["top_logprobs"], named["tokens"], strict=True):
            assert len(tops) == len(tops_by_id) == max(1, count)
            assert token in tops
            assert sorted(tops.values()) == sorted(tops_by_id.values())


@pytest.mark.parametrize("kind", KINDS)
def test_echoed_tokens_have_their_places(served: Served, kind: str):
    prompt = "the ab token"
    body: dict[str, Any] = {"model": kind, "prompt": prompt, "max_tokens": 6, "seed": 2, "echo": True, "logprobs": 0}
    choice = post(served, "completions", **body).json()["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(prompt)
    inside = [(token, at) for token, at in zip(tokens, offsets, strict=True) if 0 < at < len(prompt)]
    assert inside
    assert all(prompt.startswith(token, at) for token, at in inside)
    assert sum(at >= len(prompt) for at in offsets) >= 6


def test_bytes_of_chat_logprobs_are_those_of_the_tokens(served: Served):
    body = {"model": "llama2", "messages": [{"role": "user", "content": "the"}], "max_tokens": 40, "seed": 3}
    reply = post(served, "chat/completions", **body, logprobs=True, top_logprobs=100, ignore_eos=True).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == 40
    for entry in entries:
        assert len(entry["top_logprobs"]) == 100
        if REPLACEMENT not in entry["token"]:
            assert bytes(entry["bytes"]).decode() == entry["token"]
    assert " the" in [top["token"] for entry in entries for top in entry["top_logprobs"]]


def test_top_p_0_is_greedy(served: Served):
    body: dict[str, Any] = {"model": "gemma", "prompt": "the", "max_tokens": 8, "return_token_ids": True}
    greedy, first = (post(served, "completions", **body, **more) for more in ({"temperature": 0}, {"top_p": 0}))
    assert greedy.json()["choices"][0]["token_ids"] == first.json()["choices"][0]["token_ids"]
    answer = post(served, "completions", **body, top_p=-0.1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_p")
