"""Trinity's monitor as `monitors` of ours, beside the console and the report, with Trinity's names of metrics."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity.schema import TrinityFile

KNOWN: dict[str, tuple[str, ...]] = {"tensorboard": (), "wandb": ("base_url",), "mlflow": ("uri",)}
"""Trackers, and which of Trinity's arguments they take."""
SECRETS = {
    "api_key": "Set WANDB_API_KEY in the environment.",
    "username": "Set MLFLOW_TRACKING_USERNAME in the environment.",
    "password": "Set MLFLOW_TRACKING_PASSWORD in the environment.",
}


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`monitors`, where the file names one."""
    section = file.monitor
    kind, arguments = section.monitor_type, dict(section.monitor_args or {})
    if kind == "swanlab":
        cure = "Use tensorboard, mlflow, or wandb (WANDB_MODE=offline needs no account)."
        becoming.fault("monitor.monitor_type", "swanlab is not served.", cure)
        return
    if kind not in KNOWN:
        near = get_close_matches(kind, KNOWN, n=1)
        cure = f"Did you mean '{near[0]}'?" if near else f"Known here: {', '.join(KNOWN)}."
        becoming.fault("monitor.monitor_type", f"there is no '{kind}'.", cure)
        return
    if not section.model_fields_set & {"monitor_type", "monitor_args"}:
        return
    found: dict[str, Any] = {"type": kind, "names": "trinity"}
    if kind != "tensorboard":
        found |= {"project": file.project, "group": file.group, "name": file.name}
    for name, value in arguments.items():
        key = f"monitor.monitor_args.{name}"
        if name in SECRETS:
            becoming.fault(key, "a run writes its settings down, and this is a secret.", SECRETS[name])
        elif name not in KNOWN[kind]:
            becoming.fault(key, "there is no such argument.", f"Known here: {', '.join(KNOWN[kind]) or 'none'}.")
        else:
            found[name] = value
    becoming.put("monitors", [{"type": "console"}, {"type": "report"}, found])
