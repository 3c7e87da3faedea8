"""Base models: which are on this machine, and which a running server serves."""

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
    """A model on this machine: what `--model` takes, where it lies, how large it is."""

    name: str
    folder: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server has loaded."""

    name: str
    context: int


def cached() -> list[Cached]:
    """Models in the hub's cache and in ours, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from tinsmith.engine.model.sources import cache_folder

    found = []
    try:
        for repo in scan_cache_dir().repos:
            files = {file.file_name for revision in repo.revisions for file in revision.files}
            if repo.repo_type == "model" and "config.json" in files:
                found.append(Cached(repo.repo_id, Path(repo.repo_path), repo.size_on_disk))
    except CacheNotFound:
        pass  # nothing was fetched yet
    for config in sorted(cache_folder().glob("*/config.json")):
        folder = config.parent
        name = DEFAULT_MODEL if folder.name == DEFAULT_MODEL.rpartition("/")[2].lower() else str(folder)
        found.append(Cached(name, folder, sum(file.stat().st_size for file in folder.iterdir() if file.is_file())))
    return sorted(found, key=lambda one: one.name)


def served(url: str, key: str) -> list[Served]:
    """What the server at this URL serves. Raises ConfigError if it cannot be asked."""
    request = urllib.request.Request(f"{url.rstrip('/')}/api/v1/get_server_capabilities", headers={"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            models = json.load(answer)["supported_models"]
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answers {error.code}.", "Set TINKER_API_KEY to a key of that server.") from error
    except urllib.error.URLError as error:
        raise ConfigError(f"No server answers at {url}: {error.reason}.", "Start one: tinsmith serve") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{url} gives no answer of the Tinker API: {error}.", "Check the URL.") from error
    return [Served(one["model_name"], one["max_context_length"]) for one in models]


def pull(name: str) -> Path:
    """Fetch a model (or find it here) and say where it lies. Raises ConfigError if there is none of this name."""
    from tinsmith.engine.model.sources import locate

    return Path(locate(name).folder)
