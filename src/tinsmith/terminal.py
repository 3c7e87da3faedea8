"""Where commands and runs print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def new_console(**options: Any) -> Console:
    """A console without emoji codes: ids such as SESSION:train:0 and texts of models are printed as they are."""
    from rich.console import Console

    return Console(**options, emoji=False)
