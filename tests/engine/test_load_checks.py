"""Checks at load: checks for the same model, settings, programs and machine, and repeated for any other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from tests.architectures import save_tiny
from tinsmith.engine import load_checks
from tinsmith.engine.base import Datum, LoraSpec, Pass, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu.calls import CompiledCalls
from tinsmith.engine.cpu.compiling import Compilation
from tinsmith.engine.load_checks import LoadChecks, checks_of
from tinsmith.engine.lora import layers
from tinsmith.engine.model import loading, self_check
from tinsmith.engine.sampling import decode_check
from tinsmith.engine.torch_engine import TorchEngine

ROW = np.arange(3, 19, dtype=np.int32)
PASS = Pass(
    model_id="m",
    data=(Datum(tokens=ROW[:-1], targets=ROW[1:].astype(np.int64), inputs={"weights": np.ones(15, np.float32)}),),
    loss_fn="cross_entropy",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checks"


def config(folder: Path, **options: Any) -> EngineConfig:
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "keeps_checks": True, **options}
    return EngineConfig(source=str(folder), **settings)


def results(engine: TorchEngine) -> tuple[bytes, bytes]:
    """Bits of the logprobs and of the gradient of a pass."""

    async def run() -> tuple[bytes, bytes]:
        await engine.create("m", LoraSpec(rank=4, seed=0))
        [result] = await engine.run([PASS])
        assert isinstance(result, PassResult)
        gradients = engine.trainer.gradients("m")
        return result.logprobs[0].tobytes(), b"".join(a.tobytes() + b.tobytes() for a, b in gradients.values())

    return asyncio.run(run())


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_next_load_computes_no_check_and_the_same_bits(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(model_type, tmp_path / "model")
    first = TorchEngine(config(folder))
    computed = list[str]()
    for module, name in ((self_check, "_error"), (decode_check, "_decoded"), (layers, "_same_outputs")):
        compute: Callable[..., Any] = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, c=compute: (computed.append(n), c(*a))[1])
    second = TorchEngine(config(folder))
    assert "_error" not in computed
    assert "_decoded" not in computed
    if model_type == "llama":
        assert computed == []
    assert results(first) == results(second)
    assert replace(first.card, free_bytes=0) == replace(second.card, free_bytes=0)
    TorchEngine(config(folder, keeps_checks=False))
    assert {"_error", "_decoded"} <= set(computed)


class Unfinished(Compilation):
    """Still compiles functions for gradients when the model is loaded."""

    @property
    @override
    def compiles_gradients(self) -> bool:
        return True


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a load, functions for gradients are still being compiled."""
    pytest.importorskip("numba")
    monkeypatch.setattr(loading, "Compilation", Unfinished)


@pytest.mark.usefixtures("compiling")
def test_gradients_are_checked_before_the_first_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, checked = save_tiny("llama", tmp_path / "model"), list[bool]()
    works = self_check._compiled_attention_works
    monkeypatch.setattr(
        self_check,
        "_compiled_attention_works",
        lambda *a, gradients: (checked.append(gradients), works(*a, gradients=gradients))[1],
    )
    engine = TorchEngine(config(folder))
    assert checked == [False]
    first = results(engine)
    assert checked == [False, True]
    assert results(engine) == first
    assert results(TorchEngine(config(folder))) == first
    assert checked == [False, True]
    [file] = cache.iterdir()
    assert json.loads(file.read_text())["gradients of compiled attention"] is True
    TorchEngine(config(folder, keeps_checks=False))
    assert checked == [False, True, False, True]


@pytest.mark.usefixtures("compiling")
def test_engine_with_wrong_gradients_starts_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    logprobs, _ = results(TorchEngine(config(folder, keeps_checks=False)))
    monkeypatch.setattr(CompiledCalls, "backward", lambda *_: 1 / 0)
    engine = TorchEngine(config(folder))
    with pytest.raises(SystemExit, match="starts again without them"):
        results(engine)
    restarted, _ = results(TorchEngine(config(folder)))
    np.testing.assert_allclose(*(np.frombuffer(each, np.float32) for each in (logprobs, restarted)), rtol=1e-5)


def test_refused_model_is_checked_at_each_load(cache: Path) -> None:
    checks, calls = LoadChecks(cache / "model.json"), list[int]()

    def refuse() -> None:
        calls.append(0)
        raise ValueError("no")

    for again in (checks, checks, LoadChecks(cache / "model.json")):
        with pytest.raises(ValueError, match=r"^no$"):
            again.result("attention", refuse)
        again.keep()
    assert len(calls) == 3


DIFFERENCES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "config of the model": lambda folder, _: (folder / "config.json").write_text('{"vocab_size": 9}'),
    "code beside the model": lambda folder, _: (folder / "modeling.py").write_text("x = 1"),
    "size of the weights": lambda folder, _: (folder / "model.safetensors").write_bytes(b"1234"),
    "version of a package": lambda _, patch: patch.setattr(load_checks, "version", lambda package: "9"),
    "code of the engine": lambda folder, patch: patch.setattr(load_checks, "__file__", str(folder / "engine.py")),
    "kernels by a variable": lambda _, patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "machine": lambda _, patch: patch.setattr(load_checks.platform, "platform", lambda: "other"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_any_difference_has_the_checks_run_again(
    difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"123")
    checks = checks_of(config(tmp_path), tmp_path)
    assert checks.result("attention", lambda: 1) == 1
    checks.keep()
    assert checks_of(config(tmp_path), tmp_path).result("attention", lambda: 2) == 1
    DIFFERENCES[difference](tmp_path, monkeypatch)
    assert checks_of(config(tmp_path), tmp_path).result("attention", lambda: 2) == 2


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"threads": 2}, {"deterministic": True}])
def test_other_settings_have_the_checks_run_again(options: dict[str, Any], tmp_path: Path) -> None:
    checks = checks_of(config(tmp_path), tmp_path)
    checks.result("attention", lambda: 1)
    checks.keep()
    assert checks_of(config(tmp_path, **options), tmp_path).result("attention", lambda: 2) == 2


@pytest.mark.parametrize("content", [b"", b'{"attention": 1', b"[1]", b"[[1, 2], 3]", b"\xff"])
def test_file_that_is_not_whole_has_the_checks_run_again(content: bytes, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "model.json").write_bytes(content)
    checks = LoadChecks(cache / "model.json")
    assert checks.result("attention", lambda: 2) == 2
    checks.keep()
    assert LoadChecks(cache / "model.json").result("attention", lambda: 3) == 2


def test_results_are_not_kept_where_nothing_can_be_written(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in place of the folder")
    checks = LoadChecks(cache / "model.json")
    checks.result("attention", lambda: 1)
    checks.keep()
    assert cache.is_file()


def test_only_what_is_json_is_kept(cache: Path) -> None:
    checks = LoadChecks(cache / "model.json")
    assert checks.result("sinks", lambda: {1j}) == {1j}
    checks.result("attention", lambda: None)
    checks.keep()
    assert json.loads((cache / "model.json").read_text()) == {"attention": None}


def test_oldest_files_are_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_checks, "MAX_FILES", 2)
    for age, name in enumerate("cab"):
        checks = LoadChecks(cache / f"{name}.json")
        checks.result("attention", lambda: 1)
        checks.keep()
        os.utime(cache / f"{name}.json", (1000 + age, 1000 + age))
    checks = LoadChecks(cache / "d.json")
    checks.result("attention", lambda: 1)
    checks.keep()
    assert {file.name for file in cache.iterdir()} == {"b.json", "d.json"}
