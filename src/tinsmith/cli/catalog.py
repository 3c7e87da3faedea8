"""Base models: those on this machine, and those a running server serves, loads and unloads."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tinsmith.engine.config import DEFAULT_MODEL
from tinsmith.errors import ConfigError
from tinsmith.imports import require_torch

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Cached:
    """A model on this machine: its name for `--model`, its folder and its size."""

    name: str
    folder: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server has loaded."""

    name: str
    context: int
    details: str
    """Architecture, path, dtype, memory, and what adapters reach, in lines; empty without an admin key."""


@dataclass(frozen=True, slots=True)
class NotServed:
    """A model that a server is loading, or could not load."""

    name: str
    state: str
    error: str
    """Why it was not loaded; empty while it loads."""


def cached() -> list[Cached]:
    """Models in the cache of the Hugging Face hub and in Tinsmith's, sorted by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from tinsmith.engine.config import cache_folder

    models = []
    try:
        for repo in scan_cache_dir().repos:
            files = {file.file_name for revision in repo.revisions for file in revision.files}
            if repo.repo_type == "model" and "config.json" in files:
                models.append(Cached(repo.repo_id, Path(repo.repo_path), repo.size_on_disk))
    except CacheNotFound:
        pass  # nothing was downloaded yet
    for config in sorted(cache_folder().glob("*/config.json")):
        folder = config.parent
        name = DEFAULT_MODEL if folder.name == DEFAULT_MODEL.rpartition("/")[2].lower() else str(folder)
        models.append(Cached(name, folder, sum(file.stat().st_size for file in folder.iterdir() if file.is_file())))
    return sorted(models, key=lambda model: model.name)


def served(url: str, key: str) -> list[Served]:
    """The models of the server at this URL. Raises ConfigError if it does not respond."""
    models = _call("GET", url, key, "get_server_capabilities")["supported_models"]
    try:
        details = {status["name"]: _details(status.get("model")) for status in _base_models(url, key)}
    except ConfigError:  # only administrators see them
        details = {}
    names = ((model["model_name"], model["max_context_length"]) for model in models)
    return [Served(name, context, details.get(name, "")) for name, context in names]


def not_served(url: str, key: str) -> list[NotServed]:
    """Models that the server loads at the moment or failed to load; none without an admin key."""
    try:
        models = _base_models(url, key)
    except ConfigError:
        return []
    absent = (model for model in models if model["state"] in ("loading", "failed"))
    return [NotServed(model["name"], model["state"], model["error"] or "") for model in absent]


def _details(model: dict[str, Any] | None) -> str:
    """A line, then one for each part that adapters reach. Such as:

    llama, fast path, bfloat16 on cpu, 0.3 GB
    attn: q_proj k_proj v_proj o_proj; 55,296 parameters for each unit of rank
    """
    if model is None:
        return ""
    memory = f", {model['weight_bytes'] / 1e9:.1f} GB" if model["weight_bytes"] else ""
    limit = f"; {model['context_limit']}" if model["context_limit"] else ""
    images = ", takes images" if model.get("images") else ""
    device = f"{model['dtype']} on {model['device']}"
    lines = [f"{model['arch']}, {model['path']} path, {device}{memory}{images}{limit}"]
    if model["general_path_fault"]:
        lines.append(f"WARNING: several times slower than on the fast path. {model['general_path_fault']}")
    for part, count in model["parameters_per_rank"].items():
        if count:
            names = " ".join(model["adapted_modules"].get(part, ())) or "no module known by name"
            lines.append(f"{part}: {names}; {count:,} parameters for each unit of rank")
    return "\n".join(lines)


def load(url: str, key: str, name: str, source: str, *, replace: bool) -> None:
    """Load a base model into a running server, and wait until it is served. Raises ConfigError if that fails."""
    _call("POST", url, key, "admin/base_models", {"name": name, "source": source, "replace": replace})
    while True:
        time.sleep(POLL_S)
        (status,) = (each for each in _base_models(url, key) if each["name"] == name)
        if status["state"] == "failed":
            raise ConfigError(f"{name} cannot be loaded: {status['error']}", "The other models are served as before.")
        if status["state"] != "loading" and status["source"] == source:
            return


def unload(url: str, key: str, name: str) -> None:
    """Unload a base model of a running server, and wait until it is gone. Raises ConfigError if that fails."""
    _call("DELETE", url, key, f"admin/base_models/{quote(name)}")
    while any(each["name"] == name for each in _base_models(url, key)):
        time.sleep(POLL_S)


def _base_models(url: str, key: str) -> list[dict[str, Any]]:
    return _call("GET", url, key, "admin/base_models")["base_models"]


def _call(method: str, url: str, key: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of a response. Raises ConfigError for any other response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/api/v1/{path}", data, {"X-API-Key": key}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 401 or method == "GET":
            message, hint = f"{url} responds with status {error.code}.", "Set TINKER_API_KEY to a key of that server."
        else:
            message, hint = str(json.load(error)["detail"]), ""
        raise ConfigError(message, hint) from error
    except urllib.error.URLError as error:
        raise ConfigError(f"No server responds at {url}: {error.reason}.", "Start one: tinsmith serve") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{url} does not respond like a Tinker API server: {error}.", "Check the URL.") from error


def pull(name: str) -> Path:
    """Download a model, unless it is here already, and return its folder. Raises ConfigError for an unknown name."""
    require_torch("tinsmith models pull")
    from tinsmith.engine.model.sources import locate

    return Path(locate(name).folder)
