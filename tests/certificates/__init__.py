"""One certificate, which signs nothing, in place of all authorities: each HTTP client reads them, also one without TLS.

The SDK creates a client for each pool of connections, and reading the authorities of a system takes 30 ms of a core.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "SSL_CERT_FILE"
SYSTEM = dict(os.environ)
"""The environment of a program that reaches the network, such as pip: with the system's authorities."""


def replace() -> None:
    """Let this process and the programs that it starts trust the one certificate alone."""
    os.environ[VARIABLE] = str(Path(__file__).with_name("authority.pem"))
