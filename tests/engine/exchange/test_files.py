"""Files of adapters: shards, names, data types; and every damage is one sentence that names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.exchange.test_exchange import write_peft
from tests.engine.exchange.test_peft_options import ALL, assert_refused, logprobs, peft_logprobs, with_settings
from tinsmith.engine.exchange.adapters import make_readable
from tinsmith.engine.exchange.files import SHARD_INDEX
from tinsmith.errors import TinsmithError

PREFIX = "base_model.model."
KEY = f"{PREFIX}model.layers.1.self_attn.v_proj.lora_A.weight"
OTHER = KEY.replace("_A", "_B")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of PEFT without further options."""
    return write_peft(
        tiny_llama, tmp_path_factory.mktemp("plain") / "peft", size=0.05, r=4, lora_alpha=8, target_modules=ALL
    )


@pytest.fixture
def edited(plain: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], Tensors]], Path]:
    """A function that writes the adapter with changed tensors."""

    def edit(change: Callable[[Tensors], Tensors]) -> Path:
        adapter = with_settings(plain, tmp_path / "adapter", {})
        file = adapter / "adapter_model.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in change(load_file(file)).items()}, file)
        return adapter

    return edit


def without(tensors: Tensors, part: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if part not in key}


def filled(value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[KEY][1, 2] = value
        return tensors

    return change


def empty(part: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: torch.empty(shape) if part in key else value for key, value in tensors.items()}


NAME = r"layers\.1\.self_attn\.v_proj\.lora_A"
DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "shape [0]": (empty("v_proj", 0), r"v_proj\.lora_A\.weight in \S+ is empty: shape \[0\].*ZeRO-3.*zero_to_fp32"),
    "one of shape [0]": (empty(KEY, 0), rf"{NAME}\.weight in \S+ is empty"),
    "shape [0, 64]": (empty(OTHER, 0, 64), r"v_proj\.lora_B\.weight in \S+ is empty: shape \[0, 64\]"),
    "all of the MLP": (empty("mlp", 0), r"mlp\S+ in \S+ is empty.*\(12 of its 28 matrices are\)"),
    "NaN": (filled(torch.nan), rf"{NAME}\.weight in \S+ holds values that are not finite"),
    "infinity": (filled(torch.inf), rf"{NAME}\.weight in \S+ holds values that are not finite"),
    "too large for float32": (
        lambda tensors: {**tensors, KEY: tensors[KEY].double() * 1e300},
        rf"{NAME}\.weight in \S+ holds values that are not finite",
    ),
    "int8": (lambda tensors: {**tensors, KEY: tensors[KEY].to(torch.int8)}, rf"{NAME}\.weight in \S+ .* int8"),
    "no A": (lambda tensors: without(tensors, KEY), rf"lacks \S*{NAME}\.weight"),
    "no B": (lambda tensors: without(tensors, OTHER), r"lacks \S*layers\.1\.self_attn\.v_proj\.lora_B\.weight"),
    "ranks of A and B": (lambda tensors: {**tensors, KEY: tensors[KEY][:2]}, rf"{NAME}\.weight and .*\[2, 96\]"),
    "one dimension": (lambda tensors: {**tensors, KEY: tensors[KEY].flatten()}, rf"{NAME}\.weight and .*\[384\]"),
    "twice": (
        lambda tensors: {**tensors, KEY.replace(".weight", ".default.weight"): tensors[KEY].clone()},
        rf"holds \S*{NAME}\.weight twice",
    ),
    "twice by prefix": (lambda tensors: {**tensors, KEY.removeprefix(PREFIX): tensors[KEY].clone()}, "twice"),
    "another adapter": (
        lambda tensors: {key.replace(".weight", ".mine.weight"): value for key, value in tensors.items()},
        "an adapter named 'mine'",
    ),
    "unknown key": (lambda tensors: {**tensors, "score.weight": torch.ones(2, 2)}, r"score\.weight"),
    "embeddings": (
        lambda tensors: {**tensors, f"{PREFIX}model.embed_tokens.weight": torch.ones(2, 2)},
        r"embed_tokens\.weight",
    ),
    "embedding matrices": (
        lambda tensors: {**tensors, f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(2, 2)},
        r"lora_embedding_A",
    ),
    "magnitude": (
        lambda tensors: {**tensors, KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(64)},
        "lora_magnitude_vector",
    ),
    "bias": (lambda tensors: {**tensors, OTHER.replace("weight", "bias"): torch.ones(64)}, r"lora_B\.bias"),
    "nothing": (lambda tensors: {}, "holds no LoRA matrices"),
}
OF_MODEL: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "hidden size": (lambda tensors: {**tensors, KEY: tensors[KEY][:, :32]}, rf"{NAME}\.weight .*\[4, 32\].*\[4, 96\]"),
    "outputs": (lambda tensors: {**tensors, OTHER: tensors[OTHER][:7]}, r"v_proj\.lora_B\.weight .*\[7, 4\]"),
    "a layer too many": (
        lambda tensors: {
            **tensors,
            **{key.replace("layers.1.", "layers.7."): tensors[key].clone() for key in (KEY, OTHER)},
        },
        r"layers\.7\.self_attn\.v_proj",
    ),
    "a module is missing": (lambda tensors: without(tensors, "layers.1.self_attn.v_proj"), rf"lacks \S*{NAME}"),
    "a kind of module is missing": (lambda tensors: without(tensors, "v_proj"), r"lacks \S*v_proj\.lora_A"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_the_tensors_name(
    damage: str, edited: Any, tiny_llama: Path, engine: Any, wait: Any
) -> None:
    change, match = DAMAGES[damage]
    assert_refused(edited(change), tiny_llama, engine, wait, match)


@pytest.mark.parametrize("damage", OF_MODEL)
def test_another_models_adapter_is_refused(damage: str, edited: Any, tiny_llama: Path, engine: Any, wait: Any) -> None:
    """Found where the model's modules are known."""
    from tinsmith.engine.exchange.merge import merge

    change, match = OF_MODEL[damage]
    adapter = edited(change)
    with pytest.raises(TinsmithError, match=match):
        wait(engine.fork("refused", adapter, optimizer=False))
    with pytest.raises(TinsmithError, match=match):
        merge(adapter, tiny_llama, adapter.parent / "out")
    assert not (adapter.parent / "out").exists()


DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_types_are_read_as_by_peft(
    dtype: torch.dtype, edited: Any, tiny_llama: Path, engine: Any, wait: Any, model_id: str, tmp_path: Path
) -> None:
    adapter = edited(lambda tensors: {key: tensor.to(dtype) for key, tensor in tensors.items()})
    make_readable(adapter, tmp_path / "in")
    wait(engine.fork(model_id, tmp_path / "in", optimizer=False))
    np.testing.assert_allclose(logprobs(engine, wait, model_id), peft_logprobs(tiny_llama, adapter), atol=1e-5)
    wait(engine.drop(model_id))


def renamed(tensors: Tensors) -> Tensors:
    return {key.replace(".weight", ".default.weight"): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("change", [renamed, lambda t: {key.removeprefix(PREFIX): t[key] for key in t}])
def test_other_names_of_the_same_matrices(change: Any, edited: Any, plain: Path, tmp_path: Path) -> None:
    make_readable(edited(change), tmp_path / "in")
    written, tensors = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "in", plain))
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)


def sharded(source: Path, folder: Path, *, index: bool) -> Path:
    """The adapter in two files."""
    adapter = with_settings(source, folder, {})
    whole = adapter / "adapter_model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    files: dict[str, Tensors] = {f"adapter_model-0000{number}-of-00002.safetensors": {} for number in (1, 2)}
    for number, key in enumerate(sorted(tensors)):
        files[sorted(files)[number % 2]][key] = tensors[key]
    for name, part in files.items():
        save_file(part, adapter / name)
    if index:
        places = {key: name for name, part in files.items() for key in part}
        (adapter / SHARD_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return adapter


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read(index: bool, plain: Path, tmp_path: Path) -> None:
    make_readable(sharded(plain, tmp_path / "adapter", index=index), tmp_path / "in")
    written, tensors = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "in", plain))
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_refused(index: bool, plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path):
    adapter = sharded(plain, tmp_path / "adapter", index=index)
    (adapter / "adapter_model-00002-of-00002.safetensors").unlink()
    match = "lacks adapter_model-00002-of-00002" if index else "1 shard of 2"
    assert_refused(adapter, tiny_llama, engine, wait, match)


PLACES = [
    {KEY: "../adapter_model-00001-of-00002.safetensors"},
    {KEY: 3},
    {"x": "adapter_model-00001-of-00002.safetensors"},
]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_wrong_index_is_refused(
    places: Any, plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path
) -> None:
    adapter = sharded(plain, tmp_path / "adapter", index=True)
    (adapter / SHARD_INDEX).write_text(json.dumps({"weight_map": places}))
    assert_refused(adapter, tiny_llama, engine, wait, "index.json|lacks x")


def test_pickled_adapter_is_refused(plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path) -> None:
    adapter = with_settings(plain, tmp_path / "adapter", {})
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert_refused(adapter, tiny_llama, engine, wait, r"adapter_model\.bin.*safe_serialization")


def test_half_a_file_is_refused(plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path) -> None:
    adapter = with_settings(plain, tmp_path / "adapter", {})
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(adapter, tiny_llama, engine, wait, r"adapter_model\.safetensors cannot be read")
