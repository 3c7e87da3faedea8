"""Where commands and runs print, and the exit codes of a run."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

STOPPED_EARLY = 75
"""Exit code of a run that stopped before its last step and can be continued: EX_TEMPFAIL of sysexits.h."""
REFUSED = 2
"""Exit code of a command that cannot do its work: a setting, a file or a request is at fault."""
TRAINED_NOTHING = 3
"""Exit code of a run in which no step updated the weights."""
NOTEBOOK_COLUMNS = 120
"""Width of the output of a cell."""


def new_console(**options: Any) -> Console:
    """A console without emoji codes: ids such as SESSION:train:0 and texts of models are printed as they are.

    In a notebook it writes plain lines: a cell is no terminal, whatever its kernel's variables say, and Rich's widgets
    there need a package that may be missing.
    """
    from rich.console import Console

    if in_notebook():
        options = {"force_terminal": False, "width": NOTEBOOK_COLUMNS, **options}
    return Console(**options, emoji=False, force_jupyter=False)


def in_notebook() -> bool:
    """Whether this code runs in IPython, as a cell of a notebook does: what is printed appears below the cell."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def waiting(console: Console, text: str) -> AbstractContextManager[Any]:
    """Show what a block waits for: while it lasts in a terminal, else as a line."""
    if console.is_terminal:
        return console.status(text)
    console.print(text, highlight=False, soft_wrap=True)
    return nullcontext()
