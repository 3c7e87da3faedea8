"""Base models: those on this machine, and those a running server serves."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.config import DEFAULT_MODEL
from tinsmith.errors import ConfigError


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
    request = urllib.request.Request(f"{url.rstrip('/')}/api/v1/get_server_capabilities", headers={"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            models = json.load(response)["supported_models"]
    except urllib.error.HTTPError as error:
        raise ConfigError(
            f"{url} responds with status {error.code}.", "Set TINKER_API_KEY to a key of that server."
        ) from error
    except urllib.error.URLError as error:
        raise ConfigError(f"No server responds at {url}: {error.reason}.", "Start one: tinsmith serve") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{url} does not respond like a Tinker API server: {error}.", "Check the URL.") from error
    return [Served(model["model_name"], model["max_context_length"]) for model in models]


def pull(name: str) -> Path:
    """Download a model, unless it is here already, and return its folder. Raises ConfigError for an unknown name."""
    from tinsmith.engine.model.sources import locate

    return Path(locate(name).folder)
