"""Checks of trackers before anything is loaded: installed packages, API keys, and servers that respond.

Without an API key, or if its server does not respond, Weights & Biases records a run offline, and a note says so,
unless the run file or WANDB_MODE requires `online`.
"""

from __future__ import annotations

import configparser
import importlib.util
import netrc
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from tinsmith.errors import ConfigError
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.record.monitors.trackers import MlflowConfig, TensorboardConfig, WandbConfig, missing_package
from tinsmith.rl.record.monitors.trackio import TrackioConfig
from tinsmith.settings import Settings

_SECONDS = 5.0
"""Time limit of a connection to a tracker's server."""
_WANDB_SERVER = "https://api.wandb.ai"


def preflight(configs: Sequence[Settings], folder: Path) -> tuple[str, ...]:
    """Notes on trackers that will run otherwise than usual. Raises ConfigError for one that cannot run at all.

    `folder` is the run folder.
    """
    notes: list[str] = []
    for config in configs:
        match config:
            case TensorboardConfig():
                _require("tensorboard", package="tensorboard", extra="tensorboard")
            case WandbConfig():
                _require("wandb", package="wandb", extra="wandb")
                if why := offline_reason(config):
                    notes.append(
                        f"wandb: {why}, so the run is recorded offline; to send it later: wandb login, then wandb sync "
                        f"{Layout(folder).wandb}/offline-run-*"
                    )
            case MlflowConfig():
                _require("mlflow", package="mlflow-skinny", extra="mlflow")
                _check_mlflow(config)
            case TrackioConfig():
                _require("trackio", package="trackio", extra="trackio")
            case _:
                pass
    return tuple(notes)


def offline_reason(config: WandbConfig) -> str:
    """Why wandb cannot send the run, so that it is recorded offline; empty if it can, or if the mode is not online.

    Raises ConfigError if it cannot, and the mode is explicitly `online`.
    """
    mode = config.mode or _wandb_setting("mode")
    if mode not in ("", "online"):
        return ""
    server = config.base_url or _wandb_setting("base_url") or _WANDB_SERVER
    if not _has_key(server):
        why, fix = "there is no API key", "Run wandb login, or set WANDB_API_KEY"
    elif not _responds(server):
        why, fix = f"{server} does not respond", "Check base_url and the network"
    else:
        return ""
    if mode == "online":
        raise ConfigError(f"monitors: wandb: mode is online, but {why}.", f"{fix}; or set mode to offline.")
    return why


def _require(module: str, *, package: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise missing_package(package, extra)


def _check_mlflow(config: MlflowConfig) -> None:
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith(("http://", "https://")) and not _responds(uri):
        raise ConfigError(
            f"monitors: mlflow: no server responds at {uri}.",
            "Start it, correct uri, or set uri to a database such as sqlite:///mlflow.db.",
        )


def _responds(url: str) -> bool:
    """Whether the server accepts a connection. With a proxy, True without a connection."""
    parts = urlsplit(url)
    if getproxies().get(parts.scheme):
        return True
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def _has_key(server: str) -> bool:
    """Whether wandb will find an API key for the server, in the places where it looks."""
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _wandb_setting("api_key"):
        return True
    home = Path.home()
    paths = [Path(os.environ["NETRC"]).expanduser()] if os.environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    file = next(filter(Path.is_file, paths), None)
    if file is None:
        return False
    try:
        entries = netrc.netrc(file)
    except (netrc.NetrcParseError, OSError):
        return False
    return bool(entries.authenticators(urlsplit(server).netloc))


def _wandb_setting(name: str) -> str:
    """A setting of wandb: from the environment, or from the settings file of the working directory or of the user."""
    if value := os.environ.get(f"WANDB_{name.upper()}"):
        return value
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    for file in (Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings", user.expanduser() / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        if value := parser.get("default", name, fallback=""):
            return value
    return ""
