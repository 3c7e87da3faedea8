"""What a client of a server is installed without: PyTorch, which the extra `serve` brings."""

from __future__ import annotations

from importlib.util import find_spec

from tinsmith.errors import ConfigError


def has_torch() -> bool:
    """Whether PyTorch is installed. Does not import it."""
    return find_spec("torch") is not None


def require_torch(feature: str, instead: str = "") -> None:
    """Raise ConfigError if PyTorch, which `feature` needs, is not installed. `instead`: what works without it."""
    if not has_torch():
        raise ConfigError(
            f"{feature} needs PyTorch, which is not installed.", f"pip install 'tinsmith[serve]'. {instead}".rstrip()
        )
