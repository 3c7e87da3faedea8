"""The dashboard as a program of its own: an HTTP server until it is interrupted."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from tinsmith.dashboard.access import Access, Logins, accepts_only, is_loopback
from tinsmith.dashboard.app import Sources, create_app
from tinsmith.http_common import listen

_GRACE_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    """Where the dashboard listens, and the key that opens it."""

    host: str = "127.0.0.1"
    port: int = 8020
    """0 takes a free one."""
    key: str = ""
    """Empty: none is needed on a loopback address, and one is made for another."""
    path: str = ""
    """The path at which a proxy shows the dashboard, such as /tinsmith; empty: at the root."""


def serve(config: DashboardConfig, sources: Sources, announce: Callable[[str, str], None]) -> None:
    """Serve until interrupted. Calls `announce(url, key)` once it listens; the key is empty if it was given or none is
    needed. Raises ConfigError if it cannot listen."""
    path = f"/{config.path.strip('/')}" if config.path.strip("/") else ""
    is_open = is_loopback(config.host) and not config.key
    made = "" if is_open or config.key else secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with listen(config.host, config.port, family) as listener:
        host, port = (f"[{config.host}]" if ":" in config.host else config.host), listener.getsockname()[1]
        access = Access(
            accepts=accepts_only(config.key or made),
            logins=Logins(),
            is_open=lambda: is_open,
            missing=f"Open http://{host}:{port} on its machine, or start it with --key." if is_open else "",
            explanation="The key that the dashboard was started with.",
        )
        announce(f"http://{host}:{port}/", made)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(sources, access),
                root_path=path,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_GRACE_S,
                proxy_headers=False,
            )
        )
        server.run([listener])
