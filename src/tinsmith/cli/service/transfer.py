"""The commands `tinsmith import` and `tinsmith export`: adapters and models in and out."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tinsmith.cli.machine import Server, server_address
from tinsmith.errors import ConfigError
from tinsmith.http_common import refusal
from tinsmith.imports import require_torch
from tinsmith.plurals import counted

if TYPE_CHECKING:
    import httpx

    from tinsmith.rl.history import RunCheckpoint

Format = Literal["peft", "merged", "gguf", "tinker", "vllm"]
TIMEOUT_S = 600.0
"""For one answer: a server rewrites a large adapter in minutes."""
_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>[^/]+)/(?P<name>[^/]+)")


def import_adapter(
    source: Path,
    /,
    *,
    name: str,
    model: str | None = None,
    data: Path | None = None,
    server: Server | None = None,
) -> None:
    """Import an adapter into a server as a checkpoint, and print its tinker:// path: load it, train on, sample.

    The adapter is checked before it is stored: plain LoRA, of the base model's shapes, finite.

    Parameters
    ----------
    source
        Folder that PEFT wrote, or a checkpoint archive (.tar). With an optimizer state, training resumes exactly.
    name
        Name of the checkpoint: the last part of its path.
    model
        Base model of the adapter, as the server names it. Default: the only one that is served.
    data
        Data folder of a server that is not running: it is started for the import, with --model NAME or NAME=SOURCE.
    """
    require_torch("tinsmith import")
    from tinsmith.engine.exchange.adapters import make_readable
    from tinsmith.engine.exchange.archive import pack, unpack

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        if not source.exists():
            raise ConfigError(f"There is no {source}.", "Give an adapter's folder, or a checkpoint archive (.tar).")
        if source.is_file():
            unpack(source, scratch / "archive")
        notes = make_readable(source if source.is_dir() else scratch / "archive", scratch / "adapter")
        pack(scratch / "adapter", scratch / "adapter.tar")
        url, key = stack.enter_context(_address(data, model, server))
        base_model = (model or _only_model(url, key)).partition("=")[0]
        with (scratch / "adapter.tar").open("rb") as content:
            size = str((scratch / "adapter.tar").stat().st_size)
            response = _request(
                "POST",
                f"{url}/api/v1/import_checkpoint",
                key,
                params={"name": name, "base_model": base_model},
                headers={"Content-Length": size},
                content=iter(lambda: content.read(1 << 20), b""),
            )
    for note in notes:
        sys.stderr.write(f"{note}\n")
    sys.stdout.write(f"{response.json()['tinker_path']}\n")


def export(
    source: str,
    /,
    *,
    to: Path,
    checkpoint: str = "",
    format: Format = "peft",
    base: str | None = None,
    llama_cpp: Path | None = None,
    outtype: str = "auto",
    push: str | None = None,
    public: Annotated[bool, Parameter(negative="")] = False,
    data: Path | None = None,
    server: Server | None = None,
) -> None:
    """Export a checkpoint: as an adapter, or merged into its base model. That of a run comes with a model card.

    Parameters
    ----------
    source
        Folder of a run, tinker:// path, or a folder with an adapter.
    to
        Folder to write; with --format gguf, the file.
    checkpoint
        Which one of a run: best, last, or a step's number. Default: the best if checkpoint.keep is best, else the last.
    format
        peft: adapter for PEFT. vllm: adapter for vLLM. tinker: archive form of the hosted service, with the optimizer
        state. merged: model for transformers. gguf: model for llama.cpp, by its own converter.
    base
        Base model: folder, GGUF file or hub id. Default: the one that the checkpoint was trained on.
    llama_cpp
        llama.cpp's sources, or their convert_hf_to_gguf.py. Default: the one on PATH.
    outtype
        Data type of a GGUF file, as the converter names it: f32, f16, bf16, q8_0, auto.
    push
        Repository of the Hugging Face hub that gets the result, such as me/model. It is created if necessary, private.
    public
        Create the repository for everyone.
    data
        Data folder that holds the checkpoint, whether its server runs or not.
    """
    require_torch("tinsmith export")
    from tinsmith.engine.exchange import gguf

    _check_is_new(to)
    converter = gguf.find_converter(llama_cpp) if format == "gguf" else None
    if (of_run := _checkpoint_of_run(source, checkpoint)) is not None:
        source, data = of_run.path, data or _data_of_run(of_run, server)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=_existing_parent(to))))
        adapter = _fetch(source, scratch, data, server)
        if converter is None:
            done = f"{to}: {_write(adapter, to, format, base)}"
        else:
            done = f"{to}: {_write(adapter, scratch / 'model', format, base)}"
            gguf.convert(converter, scratch / "model", to, outtype)
    done += "" if of_run is None else _write_card(of_run, to, format)
    _print_done(done, to, format)
    if push is not None:
        sys.stdout.write(f"{_push(to, push, public=public)}\n")


def _write(adapter: Path, to: Path, format: Format, base: str | None) -> str:
    """Write an adapter in another form, or its base model with the adapter merged into it. Returns what it is."""
    from tinsmith.engine.exchange import adapters
    from tinsmith.engine.exchange.merge import merge

    if format in ("peft", "tinker", "vllm"):
        adapters.write(adapter, to, format, base)
        return "adapter"
    return f"model with {counted(merge(adapter, _base_folder(adapter, base), to), 'merged weight')}"


def _checkpoint_of_run(source: str, which: str) -> RunCheckpoint | None:
    """The checkpoint of a run folder that `which` names; None for another source."""
    from tinsmith.rl.history import RunHistory, find_checkpoint

    folder = Path(source)
    if not source.startswith("tinker://") and not (folder / "adapter_config.json").exists():
        if not folder.is_dir():
            raise ConfigError(
                f"There is no folder {source}.", "Give a run's folder, an adapter's, or a tinker:// path."
            )
        saved = find_checkpoint(RunHistory.open(folder), which)
        if saved.is_of_dry_run:
            raise ConfigError(f"{source} was a dry run: its service.engine is fake, which has no weights.")
        return saved
    if which:
        raise ConfigError(f"--checkpoint selects one of a run, and {source} is none.", "Leave it out.")
    return None


def _data_of_run(checkpoint: RunCheckpoint, server: Server | None) -> Path | None:
    """The data folder of the run's own service; None if there is none, or a server is named."""
    from tinsmith.rl.history import data_folder

    return None if server is not None and server.url else data_folder(checkpoint.run)


def _write_card(checkpoint: RunCheckpoint, to: Path, format: Format) -> str:
    """Write the model card into an exported folder. Returns which step was exported, in words."""
    from tinsmith.rl.history.model_card import model_card

    if format != "gguf":  # a file
        text = model_card(checkpoint, library="transformers" if format == "merged" else "peft")
        (to / "README.md").write_text(text, encoding="utf-8")
    return f" of step {checkpoint.step}"


def _print_done(done: str, to: Path, format: Format) -> None:
    """Print what was written, and the command that takes it; none for vLLM."""
    sys.stdout.write(f"{done}\n")
    place = shlex.quote(str(to))
    if format in ("merged", "gguf"):
        sys.stderr.write(f"serve with  tinsmith serve --model {place}\n")
    elif format != "vllm":
        sys.stderr.write(f"import with  tinsmith import {place} --name NAME, into a server of its base model\n")


def _check_is_new(to: Path) -> None:
    """Raise ConfigError for a file, or a folder that holds something."""
    if to.exists() and (to.is_file() or any(to.iterdir())):
        raise ConfigError(f"{to} exists.", "Give another place, or delete it.")


@contextmanager
def _address(data: Path | None, model: str | None, server: Server | None) -> Iterator[tuple[str, str]]:
    """(URL, key) of the running server, or of one that runs on a data folder until the block ends."""
    if data is None:
        url, key = server_address(server or Server())
        yield url.rstrip("/"), key
        return
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.embedded import embedded

    config = ServeConfig(data=data) if model is None else ServeConfig(data=data, models=(model,))
    with embedded(config) as address:
        yield address


def _only_model(url: str, key: str) -> str:
    """The base model that a server serves. Raises ConfigError if it serves others too."""
    from tinsmith.cli.catalog import served

    names = [model.name for model in served(url, key)]
    if len(names) != 1:
        raise ConfigError(f"The server serves {', '.join(names) or 'no model'}.", "Say which one: --model NAME.")
    return names[0]


def _fetch(checkpoint: str, scratch: Path, data: Path | None, server: Server | None) -> Path:
    """A folder with the checkpoint's files."""
    if not checkpoint.startswith("tinker://"):
        return Path(checkpoint)
    parts = _PATH.fullmatch(checkpoint)
    if parts is None:
        raise ConfigError(f"{checkpoint} is not the path of a checkpoint.", "Give tinker://RUN/KIND/NAME.")
    if data is not None:
        return _stored(checkpoint, data)
    from tinsmith.engine.exchange.archive import unpack

    url, key = server_address(server or Server())
    route = f"training_runs/{parts['run']}/checkpoints/{parts['kind']}/{parts['name']}/archive"
    _request("GET", f"{url.rstrip('/')}/api/v1/{route}", key, to=scratch / "archive.tar")
    unpack(scratch / "archive.tar", scratch / "archive")
    return scratch / "archive"


def _stored(checkpoint: str, data: Path) -> Path:
    """The folder of a checkpoint in a data folder."""
    from tinsmith.service.backup.snapshot import open_snapshot

    with open_snapshot(data, None) as snapshot:
        folders = {record.path: data / "checkpoints" / record.id for record in snapshot.checkpoints if record.ready}
    if checkpoint not in folders:
        raise ConfigError(f"{data} holds no checkpoint {checkpoint}.", "Check the path: tinker checkpoint list.")
    return folders[checkpoint]


def _request(method: str, address: str, key: str, *, to: Path | None = None, **content: Any) -> httpx.Response:
    """A server's answer, whose body is written to a file if one is given. Raises ConfigError for any other."""
    import httpx

    headers = {"X-API-Key": key, **content.pop("headers", {})}
    try:
        with (
            httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client,
            client.stream(method, address, headers=headers, **content) as response,
        ):
            if to is None or response.is_error:
                response.read()
            else:
                with to.open("wb") as file:
                    file.writelines(response.iter_bytes(1 << 20))
    except httpx.HTTPError as error:
        raise ConfigError(f"No server responds at {address}: {error}.", "Start one: tinsmith serve") from error
    if response.is_error:
        raise ConfigError(refusal(response, address))
    return response


def _base_folder(adapter: Path, base: str | None) -> Path:
    """The folder of the base model of an adapter."""
    from tinsmith.engine.lora.saved_spec import read_config
    from tinsmith.engine.model.sources import locate

    name = base or read_config(adapter).get("base_model_name_or_path")
    if not name:
        raise ConfigError("The checkpoint does not name its base model.", "Give its folder or hub id: --base.")
    try:
        return Path(locate(name).folder)
    except ConfigError as error:
        raise ConfigError(f"The base model {name}: {error.message}", "Give its folder or hub id: --base.") from error


def _existing_parent(to: Path) -> Path:
    """The folder of a path, created if necessary: a merged model may be too large for /tmp."""
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    return to.absolute().parent


def _push(result: Path, repository: str, *, public: bool) -> str:
    """Upload a folder or a file to the hub. Returns its address. Raises ConfigError if the hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        url = hub.create_repo(repository, private=not public, exist_ok=True)
        if result.is_dir():
            hub.upload_folder(repo_id=url.repo_id, folder_path=result)
        else:
            hub.upload_file(repo_id=url.repo_id, path_or_fileobj=result, path_in_repo=result.name)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise ConfigError(
            f"{result} is written, but the hub did not take it: {error}", "Set HF_TOKEN to a token that may write."
        ) from error
    return str(url)
