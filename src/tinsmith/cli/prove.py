"""The command `tinsmith prove`."""

from __future__ import annotations

import json
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tinsmith.imports import require_torch

if TYPE_CHECKING:
    from tinsmith.service.config import ServeConfig

EXACT = ("deterministic=true", "dtype=float32", "check_model=always")
"""Settings of a proof, unless others are given."""


def prove(
    *overrides: Annotated[
        str, Parameter(help="Settings of the server, such as models=NAME.", allow_leading_hyphen=False)
    ],
    config: Path | None = None,
    out: Path | None = None,
) -> None:
    """Prove on this machine that the service is exact: a small training run, repeated in four ways.

    It starts a server of its own with deterministic=true, dtype=float32 and check_model=always, in a temporary data
    folder. Compared are the logprobs of sampler and trainer; and to the last bit the same run again, beside other
    clients, and with the server killed.

    Exits with 1 if any check fails, else with 0.

    Parameters
    ----------
    config
        YAML or TOML file of the service's settings.
    out
        JSON file for the certificate.
    """
    from tinsmith.cli.serve import read_service_settings
    from tinsmith.proof.checks import prove as run_checks
    from tinsmith.proof.server import ProofServer
    from tinsmith.terminal import new_console

    require_torch("tinsmith prove")
    console, checks = new_console(soft_wrap=True), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        status = stack.enter_context(console.status("Starting a server"))
        settings = read_service_settings(config, (*EXACT, *overrides), {"data": folder / "data"})
        server = stack.enter_context(ProofServer(settings))
        about = _about(settings, server.address.model)
        console.print("  ".join(f"{name} {value}" for name, value in about.items()), highlight=False, markup=False)

        status.update("Training four steps, in four ways: minutes on a CPU")

        def restart() -> None:
            server.kill()
            server.start()

        for check in run_checks(server.address, settings.dtype, restart):
            mark = "[green]ok  [/]" if check.passed else "[bold red]fail[/]"
            console.print(f"{mark}  {check.name:<28}  {check.result}", highlight=False)
            checks.append({"name": check.name, "passed": check.passed, "result": check.result})
    if out is not None:
        out.write_text(json.dumps({**about, "checks": checks}, indent=2) + "\n")
    sys.exit(0 if all(check["passed"] for check in checks) else 1)


def _about(settings: ServeConfig, model: str) -> dict[str, Any]:
    """What the certificate is for: its bits hold for these."""
    from importlib.metadata import version

    import torch

    from tinsmith.engine.model.loading import device_of

    return {
        "tinsmith": version("tinsmith"),
        "torch": version("torch"),
        "machine": f"{platform.system()} {platform.machine()}",
        "model": model,
        "device": device_of(settings.device).type,
        "dtype": settings.dtype,
        "threads": settings.threads or torch.get_num_threads(),
        "deterministic": settings.deterministic,
    }
