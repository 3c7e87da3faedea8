"""Every option of PEFT's LoraConfig: an adapter with it is PEFT's here (imported, trained on, exported, merged), or is
refused by the option's name. A new option of PEFT fails until it is in one of the tables."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from tests.engine.data import pass_for
from tests.engine.exchange.test_exchange import write_peft
from tests.engine.inspection import weights_of
from tests.engine.reference import Reference, plain_model, tied_embeddings_are_meant
from tinsmith.engine.base import AdamParams
from tinsmith.engine.exchange.adapters import Form, make_readable, write
from tinsmith.engine.exchange.merge import merge
from tinsmith.engine.lora import peft_settings
from tinsmith.engine.lora.peft_settings import NO_EFFECT, READ, REFUSED, SELECTIONS, VALUES, read_settings
from tinsmith.errors import TinsmithError, Unsupported

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DATA = pass_for("cross_entropy", seed=99, forward_only=True).data
ADAM = AdamParams(learning_rate=1e-2, eps=1e-3, weight_decay=0.01, grad_clip_norm=10.0)
STEPS = (1, 2, 3)
FORMS: tuple[Form, ...] = ("peft", "vllm", "tinker")

EQUAL: dict[str, dict[str, Any]] = {
    "all modules": {},
    "rank_pattern, larger": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 16}},
    "rank_pattern, smaller": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 4}},
    "rank_pattern alone": {"rank_pattern": {"v_proj": 1, "down_proj": 7}},
    "rank_pattern of each module": {"rank_pattern": {name: 1 + index for index, name in enumerate(ALL)}},
    "rank_pattern by expression": {"rank_pattern": {"[qk]_proj": 6, r"layers\.0\..*": 2}},
    "rank_pattern by full name": {"rank_pattern": {"model.layers.1.mlp.up_proj": 9}},
    "alpha_pattern alone": {"alpha_pattern": {"k_proj": 3, r"model\.layers\.1\.mlp\.\w+": 40}},
    "alpha_pattern of zero": {"alpha_pattern": {"k_proj": 0}},
    "use_rslora": {"use_rslora": True},
    "use_rslora and patterns": {"use_rslora": True, "rank_pattern": {"o_proj": 9}, "alpha_pattern": {"q_proj": 5}},
    "target_modules, some": {"target_modules": ["q_proj", "v_proj"]},
    "target_modules, one": {"target_modules": ["down_proj"]},
    "target_modules by expression": {"target_modules": r".*\.1\.self_attn\.(q|o)_proj"},
    "target_modules, all-linear": {"target_modules": "all-linear"},
    "target_modules by full name": {
        "target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    },
    "target_modules, head": {"target_modules": ["q_proj", "lm_head"], "rank_pattern": {"lm_head": 2}},
    "exclude_modules": {"exclude_modules": ["o_proj", "layers.1.mlp.up_proj"]},
    "exclude_modules by expression": {"exclude_modules": r".*layers\.0\..*"},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_to_transform, the first": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "init_lora_weights": {"init_lora_weights": "gaussian"},
    "qalora_group_size": {"qalora_group_size": 8},
    "inference_mode": {"inference_mode": True},
}
"""Settings beside r=4, lora_alpha=8 and all modules."""

REFUSED_CASES: tuple[dict[str, Any], ...] = (
    {"modules_to_save": ["norm"]},
    {"trainable_token_indices": [3, 4]},
    {"trainable_token_indices": {"embed_tokens": [3]}},
    {"megatron_config": {"tensor_model_parallel_size": 2}},
    {"use_dora": True},
    {"velora_config": {"num_groups": 8}},
    {"alora_invocation_tokens": [7, 7]},
    {"use_qalora": True},
    {"monteclora_config": {"num_samples": 2}},
    {"layer_replication": [[0, 2], [1, 3]]},
    {"lora_bias": True},
    {"use_bdlora": {"nblocks": 2}},
    {"arrow_config": {"top_k": 2}},
    {"kasa_config": {"beta": 0.1}},
    {"ensure_weight_tying": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    *({"init_lora_weights": kind} for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")),
    {"peft_type": "IA3"},
    {"a_setting_of_a_later_peft": 1},
)
MALFORMED: tuple[dict[str, Any], ...] = (
    {"r": 0},
    {"r": 2.5},
    {"lora_alpha": "8"},
    {"lora_alpha": float("nan")},
    {"rank_pattern": {"q_proj": -1}},
    {"rank_pattern": {"(q_proj": 4}},
    {"rank_pattern": [4]},
    {"alpha_pattern": {"q_proj": float("inf")}},
    {"target_modules": "(q_proj"},
    {"exclude_modules": "*"},
    {"target_modules": 7},
    {"target_parameters": {"a": 1}},
    {"layers_to_transform": 1.5},
    {"layers_to_transform": ["0"]},
)


NOT_UNIFORM = ("rank_pattern, smaller", "rank_pattern of each module", "target_modules by full name")


@pytest.fixture(scope="module", params=EQUAL)
def adapter(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that PEFT wrote with some option."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL, **EQUAL[request.param]}
    return write_peft(tiny_llama, tmp_path_factory.mktemp("option") / "peft", size=0.05, **settings)


@pytest.fixture
def imported(adapter: Path, engine: Any, wait: Any, model_id: str, tmp_path: Path) -> Iterator[str]:
    """The engine's model of the adapter."""
    make_readable(adapter, tmp_path / "readable")
    wait(engine.fork(model_id, tmp_path / "readable", optimizer=False))
    yield model_id
    wait(engine.drop(model_id))


def logprobs(engine: Any, wait: Any, model_id: str) -> np.ndarray:
    (result,) = wait(engine.run([pass_for("cross_entropy", model_id, seed=99, forward_only=True)]))
    return np.concatenate(result.logprobs)


def peft_logprobs(base: Path, adapter: Path | None = None) -> np.ndarray:
    with tied_embeddings_are_meant(), warnings.catch_warnings(action="ignore"):
        model: Any = plain_model(base)
        model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    rows = []
    for datum in DATA:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
        rows.append(logits.log_softmax(-1).gather(-1, torch.from_numpy(datum.targets)[:, None])[:, 0].numpy())
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def unchanged(tiny_llama: Path) -> np.ndarray:
    """Logprobs of the base model."""
    return peft_logprobs(tiny_llama)


@pytest.fixture(scope="module")
def expected(adapter: Path, tiny_llama: Path) -> np.ndarray:
    """Logprobs of the adapter by PEFT."""
    return peft_logprobs(tiny_llama, adapter)


def test_trained_on_as_by_peft(
    adapter: Path, imported: str, expected: np.ndarray, unchanged: np.ndarray, engine: Any, wait: Any,
    tiny_llama: Path, tmp_path: Path,
) -> None:  # fmt: skip
    assert np.abs(expected - unchanged).max() > 0.01
    np.testing.assert_allclose(logprobs(engine, wait, imported), expected, atol=1e-5)
    reference = Reference(tiny_llama, adapter)
    for seed in STEPS:
        request = pass_for("cross_entropy", imported, seed=seed)
        wait(engine.run([request]))
        reference.backward(request)
        norm = wait(engine.step(imported, ADAM))["grad_norm"]
        assert norm == pytest.approx(reference.step(ADAM), rel=1e-5)
    trained, wanted = weights_of(engine, imported, wait, tmp_path / "trained"), reference.weights()
    assert sorted(trained) == sorted(wanted)
    for name, weight in wanted.items():
        np.testing.assert_allclose(trained[name], weight, atol=1e-5, err_msg=name)
    after = np.concatenate([row.detach().numpy() for row in reference.logprobs(DATA)])
    assert np.abs(after - expected).max() > 0.01
    np.testing.assert_allclose(logprobs(engine, wait, imported), after, atol=2e-5)
    np.testing.assert_allclose(peft_logprobs(tiny_llama, tmp_path / "trained"), after, atol=2e-5)


@pytest.mark.parametrize("adapter", NOT_UNIFORM, indirect=True)
def test_training_state_resumes_exactly(imported: str, engine: Any, wait: Any, tmp_path: Path) -> None:
    other = f"{imported}-other"
    wait(engine.run([pass_for("cross_entropy", imported, seed=1)]))
    wait(engine.step(imported, ADAM))
    wait(engine.save(imported, tmp_path / "saved", optimizer=True))
    wait(engine.load(other, tmp_path / "saved", optimizer=True))
    for model_id in (imported, other):
        wait(engine.run([pass_for("cross_entropy", model_id, seed=2)]))
        wait(engine.step(model_id, ADAM))
    np.testing.assert_array_equal(logprobs(engine, wait, imported), logprobs(engine, wait, other))
    wait(engine.drop(other))


def test_every_form_is_the_same_adapter(
    adapter: Path, imported: str, expected: np.ndarray, engine: Any, wait: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    wanted = load_file(adapter / "adapter_model.safetensors")
    wait(engine.save(imported, tmp_path / "saved", optimizer=False))
    for source, forms in ((adapter, FORMS[:2]), (tmp_path / "saved", FORMS)):
        for form in forms:
            to = tmp_path / f"{source.name}-{form}"
            write(source, to, form, str(tiny_llama))
            if form != "tinker":
                np.testing.assert_allclose(peft_logprobs(tiny_llama, to), expected, atol=1e-5)
            make_readable(to, to / "readable")
            back = f"{imported}-back"
            wait(engine.fork(back, to / "readable", optimizer=False))
            np.testing.assert_allclose(logprobs(engine, wait, back), expected, atol=1e-5)
            tensors = weights_of(engine, back, wait, to / "again")
            if form != "vllm":
                assert all(np.array_equal(tensors[name], wanted[name].numpy()) for name in tensors)
            assert len(tensors) == sum("lora_" in name for name in wanted)
            wait(engine.drop(back))
    config = json.loads((tmp_path / "saved-vllm" / "adapter_config.json").read_text())
    settings = read_settings(config, tmp_path)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in wanted if "lora_" in name}
    scales = [settings.alpha_of(name) / settings.rank_of(name) for name in modules]
    assert scales == pytest.approx([settings.alpha / settings.rank] * len(scales))


def test_merged_model_has_its_logprobs(adapter: Path, expected: np.ndarray, tiny_llama: Path, tmp_path: Path) -> None:
    merge(adapter, tiny_llama, tmp_path / "merged")
    np.testing.assert_allclose(peft_logprobs(tmp_path / "merged"), expected, atol=1e-5)


def test_every_option_of_peft_is_decided() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    decided = READ | SELECTIONS | NO_EFFECT | VALUES.keys() | REFUSED.keys()
    assert fields - decided == set()
    assert REFUSED.keys() <= {name for case in REFUSED_CASES for name in case}
    tried = {name for settings in EQUAL.values() for name in settings} | {"r", "lora_alpha", "target_parameters"}
    assert (READ | SELECTIONS) - tried == {"peft_type"}


def with_settings(source: Path, folder: Path, settings: Mapping[str, Any]) -> Path:
    """A copy of an adapter with other settings."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    config = json.loads((source / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return folder


def assert_refused(adapter: Path, base: Path, engine: Any, wait: Any, match: str) -> None:
    """Import, export, merge and the engine itself refuse an adapter, and nothing is written."""
    out = adapter.parent / "out"
    for attempt in (
        lambda: make_readable(adapter, out),
        lambda: write(adapter, out, "peft"),
        lambda: write(adapter, out, "vllm"),
        lambda: merge(adapter, base, out),
        lambda: wait(engine.fork("refused", adapter, optimizer=False)),
    ):
        with pytest.raises(TinsmithError, match=match) as error:
            attempt()
        assert error.value.status == 400
        assert not out.exists()


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of PEFT without further options."""
    return write_peft(tiny_llama, tmp_path_factory.mktemp("plain") / "peft", r=4, lora_alpha=8, target_modules=ALL)


@pytest.mark.parametrize("settings", REFUSED_CASES, ids=str)
def test_other_options_are_refused_by_name(
    settings: dict[str, Any], plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path
) -> None:
    (name,) = settings
    assert_refused(with_settings(plain, tmp_path / "adapter", settings), tiny_llama, engine, wait, name)


@pytest.mark.parametrize("settings", MALFORMED, ids=str)
def test_malformed_options_are_refused_by_name(
    settings: dict[str, Any], plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path
) -> None:
    (name,) = settings
    assert_refused(with_settings(plain, tmp_path / "adapter", settings), tiny_llama, engine, wait, name)


UNSELECTED = [{"exclude_modules": ["q_proj"]}, {"layers_to_transform": [0]}, {"target_modules": ["v_proj"]}]


@pytest.mark.parametrize("settings", UNSELECTED, ids=str)
def test_matrices_that_settings_leave_out_are_refused(
    settings: dict[str, Any], plain: Path, engine: Any, wait: Any, tmp_path: Path
) -> None:
    """PEFT would load the rest and say nothing."""
    adapter = with_settings(plain, tmp_path / "adapter", settings)
    with pytest.raises(Unsupported, match=r"holds model\.layers\.\S+lora_A\.weight, which its"):
        wait(engine.fork("refused", adapter, optimizer=False))


EXPENSIVE = r"(?P<a>.*).*(?P<b>.*).*(?P<c>.*).*(?P<d>.*).*(?P=a).*(?P=b).*(?P=c).*(?P=d)(?<=[xz].)"


def test_endless_expressions_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server matches the expressions of its clients."""
    monkeypatch.setattr(peft_settings, "_MATCH_SECONDS", 0.01)
    config = {"r": 4, "lora_alpha": 8, "rank_pattern": {EXPENSIVE: 2}}
    settings = read_settings(config, tmp_path)
    with pytest.raises(Unsupported, match="takes too long"):
        settings.rank_of("model.layers.0.self_attn.q_proj_" * 8)


def test_dropout_is_noted(plain: Path, tmp_path: Path) -> None:
    adapter = with_settings(plain, tmp_path / "adapter", {"lora_dropout": 0.1})
    (note,) = make_readable(adapter, tmp_path / "out")
    assert "lora_dropout=0.1" in note


def test_converted_start_is_a_plain_adapter(tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path) -> None:
    """PEFT saves the change of an adapter whose start has changed the base, with twice the rank."""
    with tied_embeddings_are_meant(), warnings.catch_warnings(action="ignore"):
        from peft import get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=ALL, init_lora_weights="pissa")
        model: Any = get_peft_model(plain_model(tiny_llama, torch.float32), config)
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(str(tmp_path / "start"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.peft_config["default"].init_lora_weights = "pissa"
        model.save_pretrained(str(tmp_path / "peft"), path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    wait(engine.fork("converted", tmp_path / "peft", optimizer=False))
    expected = peft_logprobs(tiny_llama, tmp_path / "peft")
    np.testing.assert_allclose(logprobs(engine, wait, "converted"), expected, atol=1e-5)
    wait(engine.drop("converted"))


def test_rank_of_a_matrix_is_that_of_its_settings(
    plain: Path, tiny_llama: Path, engine: Any, wait: Any, tmp_path: Path
) -> None:
    adapter = with_settings(plain, tmp_path / "adapter", {})
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.1.self_attn.k_proj.lora_{}.weight"
    a, b = (tensors[key.format(side)] for side in "AB")
    save_file({**tensors, key.format("A"): a[:2].clone(), key.format("B"): b[:, :2].clone()}, file)
    match = r"layers\.1\.self_attn\.k_proj\.lora_A\.weight in \S+ has rank 2; r and rank_pattern give it 4"
    with pytest.raises(TinsmithError, match=match):
        wait(engine.fork("refused", adapter, optimizer=False))
    with pytest.raises(TinsmithError, match=match):
        merge(adapter, tiny_llama, tmp_path / "out")
    with pytest.raises(TinsmithError, match=match):
        write(adapter, tmp_path / "out", "peft")
