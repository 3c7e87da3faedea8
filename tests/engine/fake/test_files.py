"""The files that the fake engine imitates: a cached model's tokenizer, or the stand-in where there is none."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake import files
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.fake.files import find_files

TEXT = "What is 39 + 13? Réponds: 日本 \n\t<|im_end|>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.mark.parametrize("source", ["Nobody/has-this-model", "/models/none.gguf"])
def test_stand_in_tokenizer_encodes_any_text(source: str) -> None:
    model = find_files(source)
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < model.vocabulary == len(tokenizer)
    assert model.eos == (tokenizer.eos_token_id,)
    assert len(tokenizer.encode("the meaning of these words")) < 0.7 * len("the meaning of these words")


def test_stand_in_template_takes_tools() -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_files("Nobody/has-this-model").tokenizer)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    shown = tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert json.dumps(tool) in shown
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in shown
    assert shown.endswith("<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_hub_model_keeps_its_tokenizer_and_limits(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "described"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, folder)
    shape = {"vocab_size": 600, "max_position_embeddings": 2048, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    monkeypatch.setattr(files, "_from_hub", lambda _source: folder)
    model = find_files("Some/Model")
    assert (model.tokenizer, model.vocabulary, model.context, model.eos) == ("Some/Model", 600, 2048, (2, 0))


def test_toy_and_folder_are_as_they_were(tiny_llama: Path) -> None:
    toy = find_files("toy")
    assert (toy.vocabulary, toy.folder, toy.tokenizer) == (512, None, "characters:512")
    assert find_files(str(tiny_llama)).tokenizer == str(tiny_llama)


def test_replies_of_a_large_vocabulary_end() -> None:
    engine = FakeEngine(EngineConfig(source="Nobody/has-this-model", kind="fake"))
    prompt = np.arange(40, 60, dtype=np.int32)
    request = SampleRequest(request_id="r", prompt=prompt, num_samples=32, max_tokens=400, seed=1, version=None)
    sequences = asyncio.run(engine.sample(request)).sequences
    lengths = [len(sequence.tokens) for sequence in sequences]
    assert 2 < np.mean(lengths) < 150
    assert all(sequence.tokens[-1] == 2 for sequence in sequences if sequence.stop_reason == "stop")


def test_weights_are_of_the_model_not_of_its_place(tiny_llama: Path, tmp_path: Path) -> None:
    """Tests whose folders have new names in each run would otherwise meet other replies each time."""
    moved = shutil.copytree(tiny_llama, tmp_path / "elsewhere")
    assert find_files(str(moved)).seed == find_files(str(tiny_llama)).seed
    assert find_files("toy").seed != find_files("toy-2").seed
