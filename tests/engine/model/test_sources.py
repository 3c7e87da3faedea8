"""A base model's files: located, converted once, and reported if incomplete."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import httpx
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import loading, sources
from tinsmith.errors import ConfigError

NOT_FOUND = httpx.Response(404, request=httpx.Request("GET", "http://hub/api/models/no/such"))


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the model to damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def half(file: Path) -> None:
    """Truncate the file, as an interrupted download does."""
    os.truncate(file, file.stat().st_size // 2)


def write_gguf(file: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
    """A GGUF file with three tokens and a matrix."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(["a", "é", "<s>"])
    writer.add_tensor("norm", np.ones(32, np.float32))
    matrix = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("matrix", gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [half, Path.unlink])
def test_incomplete_model_files_are_reported(model: Path, file: str, damage: object) -> None:
    assert callable(damage)
    damage(model / file)
    with pytest.raises(ConfigError) as error:
        loading.load(EngineConfig(source=str(model), device="cpu"))
    if not (model / "config.json").exists():
        assert error.value.message == f"{model} holds no model: it has no config.json."
    else:
        assert error.value.message.startswith(f"'{model}' cannot be loaded: ")
        assert "complete files" in error.value.hint


def test_invalid_gguf_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ConfigError, match=r"a\.gguf' cannot be loaded"):
        sources.locate(str(tmp_path / "a.gguf"))


def test_each_gguf_file_is_converted_once(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the same name in two folders are different models, and so is a replaced file."""
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    opened: list[str] = []

    def from_gguf(pretrained_model_name_or_path: str, gguf_file: str, dtype: torch.dtype) -> object:
        opened.append(f"{pretrained_model_name_or_path}/{gguf_file}")
        return load(tiny_llama, dtype=dtype)

    def load_tokenizer(**_source: str) -> object:
        return tokenizer(tiny_llama)

    load, tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_gguf)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_tokenizer)
    files = [tmp_path / name / "model.gguf" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        write_gguf(file)
    folders = [sources.locate(str(file)).folder for file in (*files, *files)]
    assert folders[:2] == folders[2:]
    assert folders[0] != folders[1]
    assert opened == [str(file) for file in files]
    os.utime(files[0], (1, 1))
    assert sources.locate(str(files[0])).folder not in folders
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith("model-")) == []


def test_processes_that_start_together_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each of the processes of a base model converts the file."""
    made: list[Path] = []

    def convert(gguf: Path, folder: Path) -> Path:
        made.append(gguf)
        time.sleep(0.3)
        folder.mkdir()
        return folder

    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(sources, "_write_converted", convert)
    with ThreadPoolExecutor() as pool:
        folders = [*pool.map(lambda _: sources._convert_gguf(Path("model.gguf"), "model"), range(4))]
    assert folders == [tmp_path / "model"] * 4
    assert len(made) == 1


def test_process_does_not_wait_for_ever_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WAIT_S", 0.2)
    with sources._first(tmp_path / "model"), sources._first(tmp_path / "model"):
        pass


def test_adapter_in_place_of_a_model_says_how_to_merge_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter, not a model") as refused:
        sources.locate(str(tmp_path))
    assert f"tinsmith export {tmp_path} --format merged" in str(refused.value)
    (tmp_path / "config.json").write_text("{}")
    assert sources.locate(str(tmp_path)).folder == str(tmp_path.resolve())


def test_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no model: it has no config\.json"):
        sources.locate(str(tmp_path))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (HFValidationError("Repo id must use alphanumeric chars"), "'no/such' is neither a folder nor a hub id."),
        (
            RepositoryNotFoundError("404", response=NOT_FOUND),
            "There is no folder 'no/such', and the hub has no such model",
        ),
        (
            LocalEntryNotFoundError("a paragraph"),
            "no folder 'no/such', and it cannot be downloaded from the hub: OSError: no network",
        ),
    ],
)
def test_failed_downloads_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str) -> None:
    def snapshot_download(_source: str, *, local_files_only: bool = False, **_options: object) -> str:
        if local_files_only and not isinstance(failure, HFValidationError):
            raise LocalEntryNotFoundError("not here")
        raise failure from OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError) as error:
        sources.locate("no/such")
    assert message in str(error.value)
    assert "paragraph" not in str(error.value)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("Q4_1", "float16")])
def test_converted_matrices_have_the_bits_of_the_file(kind: str, dtype: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    assert sources._dtype_of(tmp_path / "model.gguf") == getattr(torch, dtype)


def test_shared_reader_reads_what_the_package_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    theirs = gguf.GGUFReader(tmp_path / "model.gguf")
    with sources._read_once():
        ours = gguf.GGUFReader(tmp_path / "model.gguf")
        assert gguf.GGUFReader(tmp_path / "model.gguf") is ours

    assert gguf.GGUFReader is type(theirs)
    assert {name: field.contents() for name, field in ours.fields.items()} == {
        name: field.contents() for name, field in theirs.fields.items()
    }
    assert np.array_equal(ours.tensors[0].data, theirs.tensors[0].data)


def test_transformers_reads_through_the_shared_reader(tmp_path: Path) -> None:
    """Break it: give `_dtype_of`'s reader the path as it is; a file is then read twice."""
    file = tmp_path / "model.gguf"
    write_gguf(file)
    with sources._read_once():
        sources._dtype_of(file)
        load_gguf_checkpoint(str(file))
        counts = gguf.GGUFReader.cache_info()  # pyright: ignore[reportAttributeAccessIssue]
    assert (counts.misses, counts.hits) == (1, 1)
