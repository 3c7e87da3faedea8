"""Tokenizer, chat template and detokenizer agree with transformers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tinsmith.chat import tokenizer as tokenizer_module
from tinsmith.chat.tokenizer import Tokenizer, TokenizerCache, load_tokenizer
from tinsmith.errors import BadRequest, Unsupported

TEXT = "Grüße, 日本語 and 😀😀: done"
MESSAGES = [{"role": "user", "content": "Add 39 and 13, 😀."}, {"role": "assistant", "content": "It is"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return load_tokenizer("tiny", str(tiny_llama))


@pytest.fixture(scope="module")
def theirs(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def test_rendered_prompts_equal_transformers(tokenizer: Tokenizer, theirs: Any):
    for begin, go_on in ((True, False), (False, False), (False, True)):
        ids = tokenizer.render(MESSAGES, None, add_generation_prompt=begin, continue_final_message=go_on, values={})
        wanted = theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=begin, continue_final_message=go_on, return_dict=False
        )
        assert ids == wanted
    assert tokenizer.encode(TEXT, add_special_tokens=True) == theirs(TEXT).input_ids


def test_starts_of_tokens_are_their_characters(tokenizer: Tokenizer):
    text = "ab 😀 é fox"
    ids, starts = tokenizer.encode_with_starts(text, add_special_tokens=True)
    bits = [tokenizer.texts.of(token) for token in ids]
    whole = [(bit, start) for (bit, raw), start in zip(bits, starts, strict=True) if bit.encode() == raw]
    assert all(text.startswith(bit, start) for bit, start in whole)
    partial = [start for (bit, raw), start in zip(bits, starts, strict=True) if bit.encode() != raw]
    assert partial == [3] * 4 + [5] * 2


def test_character_tokenizer_maps_ids_to_code_points():
    letters = load_tokenizer("toy", "characters:512")
    assert letters.encode("hé", add_special_tokens=True) == [ord("h"), ord("é")]
    assert letters.decode([104, 233]) == "hé"
    assert letters.special_ids == {2}


def test_rejects_what_the_template_does_not_accept(tokenizer: Tokenizer, tmp_path: Path):
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.thinking is not read"):
        tokenizer.render(
            MESSAGES, None, add_generation_prompt=True, continue_final_message=False, values={"thinking": True}
        )
    with pytest.raises(BadRequest, match="does not accept these messages"):
        tokenizer.render([{"role": "user"}], None, add_generation_prompt=True, continue_final_message=False, values={})
    with pytest.raises(BadRequest, match="surrogate"):
        tokenizer.encode("\ud83d", add_special_tokens=False)
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        load_tokenizer("bare", str(tmp_path))


def test_rendering_does_not_import_torch(tiny_llama: Path):
    program = (
        "import sys; from tinsmith.chat.tokenizer import load_tokenizer;"
        f"tokenizer = load_tokenizer('tiny', {str(tiny_llama)!r});"
        "options = {'add_generation_prompt': True, 'continue_final_message': False, 'values': {}};"
        "tokenizer.render([{'role': 'user', 'content': 'hi'}], None, **options);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tokenizers_are_loaded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both_wait = threading.Event()
    loading: list[str] = []
    most: list[int] = []

    def load(name: str, _source: str) -> Tokenizer:
        loading.append(name)
        both_wait.wait()
        most.append(len(loading))
        loading.remove(name)
        return load_tokenizer(name, "characters:128")

    monkeypatch.setattr(tokenizer_module, "load_tokenizer", load)

    async def main() -> list[Tokenizer]:
        cache = TokenizerCache()
        waiting = asyncio.gather(cache.get("a", "one"), cache.get("b", "two"))
        for _ in range(1000):  # turns in which the other one could begin
            await asyncio.sleep(0)
        both_wait.set()
        return await waiting

    assert [tokenizer.name for tokenizer in asyncio.run(main())] == ["a", "b"]
    assert most == [1, 1]
