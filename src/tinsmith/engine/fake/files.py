"""What the fake engine takes from a model's files: tokenizer, vocabulary, context, end of a reply. No weights.

A model that is named by its hub id keeps its tokenizer, from the hub or its cache. Where that cannot be had, a stand-in
takes its place, so that a run can be tried on any machine: bytes and pairs of letters, with the template `hermes`.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tinsmith.atomic import shared_folder
from tinsmith.chat.templates import chat_template
from tinsmith.chat.tokenizer import CHARACTERS
from tinsmith.engine.config import DEFAULT_MODEL, cache_folder, converted_default

log = logging.getLogger(__name__)

TOY_VOCABULARY = 512
"""Token ids of a source without files, such as `toy`."""
_CONTEXT = 32768
_STAND_IN_CONTEXT = 1_048_576
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPACE = "Ġ"
"""A space, as byte-level tokenizers write it."""
_FILES = ("config.json", "generation_config.json", "tokenizer*", "*.jinja", "special_tokens_map.json")
"""Files of a model on the hub that describe it, without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Description of the model that the fake engine stands for."""

    tokenizer: str
    """Argument of AutoTokenizer on this machine, or `characters:N` (chat.tokenizer)."""
    folder: Path | None
    """Folder of tokenizer.json; None without one."""
    seed: int
    """Seed of its weights: of what it is, not of where it lies on this machine."""
    vocabulary: int = TOY_VOCABULARY
    context: int = _CONTEXT
    eos: tuple[int, ...] = (2,)


def find_files(source: str) -> ModelFiles:
    """Files of a folder, a GGUF file, a hub id or a toy name. A hub id may be looked up over the network."""
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        seed = zlib.crc32((folder / "config.json").read_bytes())
        vocabulary = int(_json(folder / "config.json")["vocab_size"])
        return ModelFiles(tokenizer=str(folder.resolve()), folder=folder, seed=seed, vocabulary=vocabulary)
    seed = zlib.crc32(source.encode())
    if folder.is_dir():
        return ModelFiles(tokenizer=str(folder.resolve()), folder=folder, seed=zlib.crc32(folder.name.encode()))
    if "/" not in source:
        return ModelFiles(tokenizer=f"{CHARACTERS}{TOY_VOCABULARY}", folder=None, seed=seed)
    downloaded = None if folder.suffix == ".gguf" else _from_hub(source)
    if downloaded is not None and (described := _describe(source, downloaded)) is not None:
        return described
    stand_in = _stand_in()
    log.warning("%s has no tokenizer on this machine; the fake engine uses a stand-in.", source)
    size = Tokenizer.from_file(str(stand_in / "tokenizer.json")).get_vocab_size()
    return ModelFiles(tokenizer=str(stand_in), folder=stand_in, seed=seed, vocabulary=size, context=_STAND_IN_CONTEXT)


def _from_hub(source: str) -> Path | None:
    """Folder with the describing files of a model of the hub; None if they cannot be had."""
    from huggingface_hub import snapshot_download

    if source == DEFAULT_MODEL and converted_default().is_dir():
        return converted_default()
    with suppress(Exception):  # not in the hub's local cache
        return Path(snapshot_download(source, allow_patterns=list(_FILES), local_files_only=True))
    with suppress(Exception):  # no network, no such model, or no access
        return Path(snapshot_download(source, allow_patterns=list(_FILES), etag_timeout=5))
    return None


def _describe(source: str, folder: Path) -> ModelFiles | None:
    """The model with these files; None if one is missing."""
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        return None
    config = _json(folder / "config.json")
    config = config.get("text_config", config)
    ends = config.get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        ends = _json(folder / "generation_config.json").get("eos_token_id", ends)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    return ModelFiles(
        tokenizer=str(folder) if folder == converted_default() else source,
        folder=folder,
        seed=zlib.crc32(source.encode()),
        vocabulary=max(size, int(config.get("vocab_size", 0))),
        context=int(config.get("max_position_embeddings", _CONTEXT)),
        eos=_ids(ends),
    )


def _ids(ends: int | Sequence[int] | None) -> tuple[int, ...]:
    if ends is None:
        return (2,)
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _json(file: Path) -> Mapping[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _stand_in() -> Path:
    """Folder of the stand-in tokenizer, written once."""
    folder = cache_folder() / "stand-in-tokenizer"
    if folder.is_dir():
        return folder
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template("hermes"),
    }
    with shared_folder(folder) as written:
        written.mkdir()
        (written / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        _pairs_of_letters().save(str(written / "tokenizer.json"))
    return folder


def _pairs_of_letters() -> Tokenizer:
    """A byte-level tokenizer with a token for each pair of lowercase letters, and of a space and a letter."""
    pairs = [(first, second) for first in _SPACE + ascii_lowercase for second in ascii_lowercase]
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    backend = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    return backend
