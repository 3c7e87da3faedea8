"""The plan of a GPU's memory: parts never exceed the card, vLLM can start, and what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.architectures import save_tiny
from tests.engine.memory_plan.models import configs
from tinsmith.cli import app, doctor, serve
from tinsmith.engine import autotune, memory_plan, model_facts, torch_engine
from tinsmith.engine.base import ModelCard
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import linear
from tinsmith.engine.memory_plan import Gpu, MemoryPlan, ModelSizes, PlanSettings, VllmPlan, VllmSettings, plan
from tinsmith.engine.model import loading
from tinsmith.engine.sampling.kv_cache import cache_shape
from tinsmith.engine.sampling.paged.adapter_slots import most_bytes
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError
from tinsmith.service.budgets.models import memory_limit
from tinsmith.service.config import ServeConfig

GB = 10**9
SIZES = (24, 48, 80, 141)
BESIDE = PlanSettings(vllm=VllmSettings(sleep=None), samples="questions")
FITTING = {
    "Qwen3-0.6B": "24 48 80 141 | 24 48 80 141",
    "Qwen3-4B": "24 48 80 141 | 48 80 141",
    "Qwen3-4B-Instruct-2507": "24 48 80 141 | 48 80 141",
    "Qwen3-8B": "24 48 80 141 | 48 80 141",
    "Qwen3-32B": "141 |",
    "Qwen3-30B-A3B": "80 141 |",
    "Qwen2.5-7B": "24 48 80 141 | 48 80 141",
    "Llama-3.2-3B": "24 48 80 141 | 24 48 80 141",
    "Llama-3.1-8B": "24 48 80 141 | 48 80 141",
    "Mistral-7B-v0.3": "24 48 80 141 | 48 80 141",
    "gemma-2-9b": "48 80 141 | 80 141",
    "gpt-oss-20b": "80 141 | 141",
    "DeepSeek-V2-Lite": "48 80 141 | 141",
}
"""GPUs on which a model fits alone, and with vLLM beside it."""
PAGE = Path("docs/serve/gpus.md")


@cache
def facts(name: str) -> ModelSizes:
    """The facts of a well-known model in bfloat16; half a second each, in which transformers builds its modules."""
    return model_facts.facts_of(name, configs()[name], torch.bfloat16)


def gpu(size: float) -> Gpu:
    """A free GPU of so many GB."""
    return Gpu(name=f"a GPU of {size} GB", total_bytes=int(size * GB), free_bytes=int(size * GB))


def assert_vllm_starts(vllm: VllmPlan, model: ModelSizes, gpus: int = 1) -> None:
    """vLLM ends at start unless its cache holds one context, in blocks of 16 tokens."""
    blocks = -(-vllm.context // 16)
    assert vllm.context > 0
    assert vllm.cache >= blocks * 16 * model.token_bytes // gpus + model.state_bytes


def fits(name: str, size: int, settings: PlanSettings) -> bool:
    """Whether a plan exists; it is checked, or the refusal is."""
    try:
        made = plan(gpu(size), facts(name), settings)
    except ConfigError as refusal:
        if name not in refusal.message or f"{size}.00 GB" not in refusal.message:
            raise
        return False
    assert made.total <= size * GB
    if made.vllm is not None:
        assert_vllm_starts(made.vllm, made.facts)
        assert made.vllm.total <= made.vllm.share * size * GB + 1
    return True


@pytest.mark.parametrize("name", FITTING)
def test_parts_fit_on_each_card(name: str):
    alone, beside = (
        " ".join(str(size) for size in SIZES if fits(name, size, each)) for each in (PlanSettings(), BESIDE)
    )
    assert f"{alone} | {beside}".strip() == FITTING[name]


def cell(name: str, size: int, settings: PlanSettings) -> str:
    """A cell of the page's tables."""
    try:
        made = plan(gpu(size), facts(name), settings)
    except ConfigError:
        return "–"
    if made.vllm is not None:
        sleeps = "" if made.vllm.asleep is None else ", sleeps"
        return f"{made.vllm.context:,} / {made.vllm.cache_tokens:,}{sleeps}"
    return f"{made.pass_tokens:,} / {made.cache_tokens:,}"


def page_row(name: str, settings: PlanSettings) -> str:
    """A row of the page's tables."""
    cells = (cell(name, size, settings) for size in SIZES)
    return f"| {name} | {facts(name).weight_bytes / GB:.1f} GB | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", FITTING)
def test_page_shows_the_plans(name: str):
    page = PAGE.read_text()
    assert page_row(name, PlanSettings()) in page
    assert page_row(name, BESIDE) in page


@pytest.mark.parametrize("name", ["Qwen3-8B", "Llama-3.1-8B", "Qwen3-4B-Instruct-2507"])
def test_vllm_starts_beside_models_that_did_not_fit(name: str):
    """With 0.3 of 80 GB, vLLM ended at start."""
    model = facts(name)
    made = plan(gpu(80), model, BESIDE)
    assert made.vllm is not None
    assert made.vllm.context == {"Qwen3-4B-Instruct-2507": made.vllm.cache_tokens}.get(name, model.context_length)
    assert made.vllm.context >= 100_000 or name == "Qwen3-8B"
    wanted = PlanSettings(vllm=VllmSettings(context=model.context_length, memory=0.3))
    with pytest.raises(
        ConfigError, match=rf"vLLM for {name} does not fit: 0\.3 of .* 24\.00 GB; .*{model.context_length:,}"
    ):
        plan(gpu(80), model, wanted)


def test_shares_of_vllm_are_kept():
    model = facts("Qwen3-4B")
    made = plan(gpu(80), model, PlanSettings(vllm=VllmSettings(memory=0.3)))
    assert made.vllm is not None
    assert made.vllm.total == int(0.3 * 80 * GB)
    short = plan(gpu(80), model, PlanSettings(vllm=VllmSettings(context=4096)))
    assert short.vllm is not None
    assert short.vllm.context == 4096
    with pytest.raises(ConfigError, match=r"vllm\.context is 50,000, and Qwen3-4B has a context of 40,960"):
        plan(gpu(80), model, PlanSettings(vllm=VllmSettings(context=50_000)))


def test_vllm_apart_has_its_gpus_to_itself():
    alone = memory_plan.vllm_alone(gpu(80), facts("Qwen3-32B"), VllmSettings(gpus=2))
    assert_vllm_starts(alone, facts("Qwen3-32B"), gpus=2)
    assert alone.total <= 0.9 * 80 * GB
    with pytest.raises(ConfigError, match="vLLM for Qwen3-32B does not fit"):
        memory_plan.vllm_alone(gpu(80), facts("Qwen3-32B"), VllmSettings())


def test_sleeping_vllm_takes_nothing_from_a_pass():
    """To break it: subtract vLLM's total in `_plan` although it sleeps."""
    awake, asleep = (
        plan(gpu(80), facts("Qwen3-8B"), PlanSettings(vllm=VllmSettings(sleep=sleep), samples="questions"))
        for sleep in (False, True)
    )
    assert awake.vllm is not None
    assert asleep.vllm is not None
    assert asleep.pass_tokens > 2 * awake.pass_tokens
    resident = asleep.reserve + asleep.weights + asleep.stacks + asleep.slots + asleep.cache + asleep.models
    assert resident + asleep.vllm.total <= 80 * GB
    assert asleep.vllm.asleep is not None
    assert resident + asleep.activations + asleep.vllm.asleep <= 80 * GB
    assert sum(size for part, size, _ in asleep.lines() if part.startswith("vLLM")) > 0


def test_processes_of_a_group_are_planned_apart():
    """Each card by what its process does. To break it: leave out `part` in `ServeConfig.engine_config`."""

    def planned(name: str, **cluster: Any) -> MemoryPlan:
        config = ServeConfig(cluster=ClusterConfig(**cluster)).engine_config(name)
        return autotune.planned(config, gpu(80), facts(name))

    alone, trainer = planned("Qwen3-8B"), planned("Qwen3-8B", samplers=2)
    sharded, sampler = planned("Qwen3-32B", trainers=4, shard=True), trainer.sampler
    assert planned("Qwen3-8B", trainers=4) == alone
    assert sharded.weights < facts("Qwen3-32B").weight_bytes / 3
    assert sharded.cache_tokens == trainer.cache_tokens == memory_plan.CACHE_STEP
    assert trainer.models > alone.models
    assert sampler is not None
    assert sampler.models == 0
    assert trainer.sampling_tokens == sampler.cache_tokens > 2 * alone.cache_tokens


def test_vllm_admits_what_its_cache_holds():
    """The trainer's cache holds one context then. To break it: let `sampling_tokens` return `cache_tokens`."""
    for place in ("beside", "apart"):
        made = autotune.planned(EngineConfig(sampler="vllm", vllm_place=place), gpu(80), facts("Qwen3-4B"))
        vllm = made.vllm or made.vllm_apart
        assert vllm is not None
        assert made.sampling_tokens == vllm.cache_tokens > made.cache_tokens


def test_head_copy_is_gone_after_loading():
    """To break it: subtract `loading_bytes` in `_plan`."""
    model = facts("Qwen3-8B")
    assert plan(gpu(80), replace(model, loading_bytes=0), PlanSettings()) == replace(
        plan(gpu(80), model, PlanSettings()), facts=replace(model, loading_bytes=0)
    )
    with pytest.raises(ConfigError, match="float32 copies while it is loaded 70"):
        plan(gpu(80), replace(model, loading_bytes=70 * GB), PlanSettings())


def test_slots_of_decoding_are_planned_as_they_are_limited(monkeypatch: pytest.MonkeyPatch):
    """To break it: return SLOT_BYTES in `most_bytes`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for size in SIZES:
        total = gpu(size).total_bytes
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, total=total: SimpleNamespace(total_memory=total)
        )
        made = plan(gpu(size), facts("Qwen3-0.6B"), PlanSettings())
        assert most_bytes(torch.device("cuda")) == made.slots
    assert plan(gpu(80), facts("Qwen3-0.6B"), PlanSettings(samples="none")).slots == 0


def test_decoded_layer_is_planned_for_4bit_weights():
    model = model_facts.facts_of("m", configs()["Qwen3-0.6B"], torch.bfloat16, four_bit=True)
    made = plan(gpu(24), model, PlanSettings())
    assert made.decoded == model.layer_weight_bytes == 2 * 15_728_640  # q, k, v, o, gate, up, down
    assert plan(gpu(24), facts("Qwen3-0.6B"), PlanSettings()).decoded == 0


def test_stacks_are_planned_where_they_are_made():
    model = facts("Qwen3-4B")
    for size, has_products, expected in ((80, None, 2**30), (80, False, 0), (24, None, 0), (24, True, 2**30)):
        assert plan(replace(gpu(size), has_grouped_products=has_products), model, PlanSettings()).stacks == expected
    assert model_facts.facts_of("m", configs()["Qwen3-0.6B"], torch.float32).stack_bytes == 0


def test_host_needs_room_for_a_sleeping_vllm():
    made = plan(gpu(48), facts("Qwen3-8B"), BESIDE)
    autotune.check_host(made, 30 * GB)
    autotune.check_host(plan(gpu(80), facts("Qwen3-8B"), BESIDE), 0)
    with pytest.raises(ConfigError, match=r"cannot sleep: its weights and adapters take 20\.3 GB, and 8\.0 GB"):
        autotune.check_host(made, 8 * GB)


def test_engines_share_a_gpu():
    made = plan(gpu(80), facts("Qwen3-4B"), PlanSettings(engines=2))
    assert made.total <= made.available == 40 * GB


SMALL_FACTS = st.builds(
    ModelSizes,
    source=st.just("m"),
    weight_bytes=st.integers(10**6, 200 * GB),
    loading_bytes=st.integers(0, 5 * GB),
    token_bytes=st.integers(1, 10**6),
    state_bytes=st.sampled_from([0, 10**6, 10**8]),
    activation_bytes=st.floats(1000, 2e7),
    layer_bytes=st.floats(100, 1e6),
    vocab_size=st.integers(100, 300_000),
    context_length=st.integers(1, 10**6),
    parameters_per_rank=st.integers(0, 10**8),
    stack_bytes=st.sampled_from([0, 2**30]),
    layer_weight_bytes=st.integers(0, 10**9),
    layers=st.integers(1, 80),
    decoded_layers=st.integers(0, 1),
    vllm_weight_bytes=st.integers(10**6, 200 * GB),
    vllm_parameters_per_rank=st.integers(0, 10**8),
)
MAYBE = st.none() | st.integers(1, 10**6)
VLLM = st.builds(
    VllmSettings,
    memory=st.none() | st.floats(0.01, 0.99),
    context=MAYBE,
    gpus=st.integers(1, 2),
    sleep=st.sampled_from([None, False, True]),
)
SETTINGS = st.builds(
    PlanSettings,
    pass_tokens=MAYBE,
    cache_tokens=MAYBE,
    model_bytes=st.none() | st.integers(1, 10**11),
    vllm=st.none() | VLLM,
    engines=st.integers(1, 3),
    trains=st.booleans(),
    samples=st.sampled_from(["all", "questions", "none"]),
    shards=st.integers(1, 4),
)


@given(SMALL_FACTS, st.integers(1, 300), st.floats(0, 1), SETTINGS)
def test_no_plan_exceeds_the_card(model: ModelSizes, size: int, free: float, settings: PlanSettings):
    card = replace(gpu(size), free_bytes=int(free * size * GB))
    model = replace(model, weight_bytes=model.weight_bytes + model.layers * model.layer_weight_bytes)
    try:
        made = plan(card, model, settings)
    except ConfigError:
        return
    pass_tokens, cache_tokens, model_bytes, vllm = (
        settings.pass_tokens, settings.cache_tokens, settings.model_bytes, settings.vllm
    )  # fmt: skip
    assert made.total <= made.available <= min(card.free_bytes, card.total_bytes // settings.engines)
    assert all(size >= 0 for _, size, _ in made.lines())
    assert made.pass_tokens == (pass_tokens or made.pass_tokens) >= 1
    assert made.cache_tokens == (cache_tokens or made.cache_tokens) >= 1
    assert model_bytes is None or made.models == (model_bytes if settings.trains else 0)
    if made.vllm is not None:
        assert vllm is not None
        assert vllm.sleep in (None, made.vllm.asleep is not None)
        assert_vllm_starts(made.vllm, model, vllm.gpus)
        assert made.vllm.context == (vllm.context or made.vllm.context) <= model.context_length


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_text"])
def test_facts_of_a_config_are_those_of_the_engine(kind: str, tmp_path: Path):
    """Bytes of the cache and parameters to the byte; activations are about what is measured."""
    folder = save_tiny(kind, tmp_path)
    config = EngineConfig(source=str(folder), device="cpu", dtype="float32")
    base = loading.load(config)
    computed = model_facts.read_facts(config, torch.float32)
    prepared = torch_engine.prepare(config, base)
    assert computed.token_bytes == cache_shape(prepared.base).token_bytes
    recurrent = prepared.base.recurrent
    assert computed.state_bytes == (recurrent.bytes(torch.float32) if recurrent else 0)
    assert computed.parameters_per_rank == linear.layout_for(prepared.base, model_facts.EVERYTHING).size
    assert 0.99 < computed.weight_bytes / base.card.weight_bytes < 1.01  # sorted projections differ a little
    measured = autotune.activation_bytes_per_token(prepared.base, prepared.active)
    assert 0.4 * measured < computed.activation_bytes < 2 * measured
    assert autotune.memory_plan(config, prepared.base, prepared.active) is None  # on a CPU


def made_plan(**settings: Any) -> MemoryPlan:
    """A plan of a well-known model on 80 GB."""
    return autotune.planned(EngineConfig(**settings), gpu(80), facts("Qwen3-4B-Instruct-2507"))


def test_settings_of_an_engine_reach_its_plan():
    fixed = made_plan(pass_tokens=300, cache_tokens=5000, model_memory=3 * GB)
    assert (fixed.pass_tokens, fixed.cache_tokens, fixed.models) == (300, 5000, 3 * GB)
    same = made_plan(deterministic=True)
    assert (same.pass_tokens, same.cache_tokens) == (1024, 32_768)
    apart = made_plan(vllm_place="apart", vllm_gpus=2)
    assert apart.vllm is None
    assert apart.vllm_apart is not None
    assert made_plan(vllm_place="beside").vllm is not None
    shared = ServeConfig(models=("a", "b"), sampler="vllm").engine_config("a")
    assert (shared.engines, shared.vllm_place) == (2, "beside")
    assert ServeConfig(sampler="vllm", vllm=VllmConfig(devices="1")).engine_config("x").vllm_place == "apart"


def test_models_in_training_have_what_the_plan_says():
    card = ModelCard(
        source="m", tokenizer="m", arch="qwen3", vocab_size=8, context_length=262_144, eos_token_ids=(),
        dtype="bfloat16", device="cuda:0", free_bytes=50, memory=made_plan(),
    )  # fmt: skip
    assert memory_limit(None, card) == made_plan().models
    assert memory_limit(7, card) == 7
    assert memory_limit(None, replace(card, memory=None)) == 25
    planned = made_plan(vllm_place="beside")
    assert planned.vllm is not None
    assert autotune.vllm_context(EngineConfig(), card, planned) == planned.vllm.context
    assert autotune.vllm_context(EngineConfig(), card, None) == 0
    with pytest.raises(ConfigError, match="context of 262,144"):
        autotune.vllm_context(EngineConfig(vllm=VllmConfig(context=300_000)), card, None)


def test_model_is_refused_before_it_is_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    """To break it: leave out `autotune.check_memory` in TorchEngine."""
    monkeypatch.setattr(loading, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(model_facts, "gpu_of", lambda _: gpu(0.7))
    monkeypatch.setattr(torch_engine.choice, "load", lambda _: pytest.fail("the model was read"))
    with pytest.raises(ConfigError, match=r"does not fit on a GPU of 0\.7 GB: 0\.70 GB of 0\.70 GB are free"):
        torch_engine.TorchEngine(EngineConfig(source=str(tiny_llama), dtype="bfloat16", pass_tokens=500_000))


def test_plan_is_printed_for_a_card(tiny_llama: Path, capsys: pytest.CaptureFixture[str]):
    app(
        ["serve", "--plan", "--card", "80GB", "--model", str(tiny_llama), "--sampler", "vllm"],
        result_action="return_value",
    )
    printed = capsys.readouterr().out
    for words in (f"{tiny_llama} on a GPU of 80GB", "KV cache", "cache_tokens", "vLLM KV cache", "context ", "sum"):
        assert words in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"card": "80"}, "not a size of memory"),
        ({"card": "0GB"}, "not a size of memory"),
        ({"card": "many GB"}, "not a size of memory"),
        ({"card": "1MB", "pass_tokens": 10**9}, "not a size of memory"),
        ({"card": "1GB", "pass_tokens": 10**7}, "does not fit on a GPU of 1GB"),
        ({"card": "80GB", "engine": "fake"}, "no memory to plan"),
        ({"card": None}, "PyTorch finds no GPU"),
    ],
)
def test_plan_refuses_by_name(options: dict[str, Any], message: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    card = options.pop("card")
    with pytest.raises(ConfigError, match=message):
        serve._print_plan(ServeConfig(models=(str(tiny_llama),), **options), card)


def test_plan_of_a_group_names_its_processes(tiny_llama: Path):
    def lines(**cluster: Any) -> list[str]:
        settings = ServeConfig(models=(str(tiny_llama),), cluster=ClusterConfig(**cluster))
        return [next(serve.plan_table(each)).partition(": ")[0] for each in serve.memory_plans(settings, gpu(24))]

    place = f"{tiny_llama} on a GPU of 24 GB"
    assert lines() == [place]
    assert lines(trainers=2) == [f"{place}, each training process"]
    assert lines(samplers=2) == [f"{place}, each training process", f"{place}, each sampling process"]


def test_card_without_plan_is_refused():
    with pytest.raises(ConfigError, match="--card is not used without --plan"):
        serve.serve(card="80GB")


def test_doctor_shows_the_plan_of_its_gpu(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_facts, "gpu_here", lambda: gpu(80))
    settings = ServeConfig(models=(str(tiny_llama),))
    finding = doctor._run_check(doctor._plan, settings)
    assert finding.level == "ok"
    assert "models in training" in finding.message
    refused = doctor._run_check(doctor._plan, settings.model_copy(update={"pass_tokens": 10**9}))
    assert (refused.level, "does not fit" in refused.message) == ("fail", True)
    assert doctor._run_check(doctor._plan, settings.model_copy(update={"device": "cpu"})).message.startswith("no GPU")
