"""What a benchmark is run on: a model of a server, by its OpenAI API, and how it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError, Unreachable, UserError
from tinsmith.rl.evaluation.scores import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A model of a server.

    Example: Endpoint(url="http://127.0.0.1:8000", key="tml-…", model="tiny", tokenizer=Path("models/tiny"))
    """

    url: str
    key: str
    model: str
    """Name of a base model, or a tinker:// path."""
    tokenizer: Path
    """Folder of the model's tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a benchmark is sampled."""

    attempts: int = 1
    """Answers to each problem."""
    temperature: float | None = None
    """None: as the benchmark says."""
    max_tokens: int | None = None
    limit: int | None = None
    """The first so many problems; None: all."""
    chat: bool = False
    """Whether prompts of lm-evaluation-harness go through the model's chat template."""
    include: Path | None = None
    """Folder with tasks of one's own for lm-evaluation-harness."""
    concurrency: int = 32
    seed: int = 0


def require(package: str, extra: str, of: str) -> None:
    """Raise ConfigError if a package is not installed."""
    if find_spec(package) is None:
        raise ConfigError(f"{of} needs {package}, which is not installed.", f"pip install 'tinsmith[{extra}]'")


def translated(work: Callable[[], Any], of: str) -> Any:
    """The result of `work`. Raises Unreachable if it needs the hub, and UserError for other faults."""
    try:
        return work()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if _is_hub(error):
            raise Unreachable(
                f"{of}: its data is on the hub, which cannot be reached: {_line(error)}",
                "Download it on a machine with a network (HF_HOME holds it), or evaluate a local file.",
            ) from error
        raise UserError(f"{of}: {type(error).__name__}: {_line(error)}", "See its documentation.") from error


def _is_hub(error: BaseException | None) -> bool:
    """Whether a library could not reach the hub, or may not."""
    names = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "MaxRetryError", "HfHubHTTPError")
    texts = ("couldn't reach", "offline mode", "on the hub", "cannot find the requested files")
    while error is not None:
        if type(error).__name__ in names or any(text in str(error).lower() for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


Run = Callable[[str, Endpoint, Sampling], Scores]
"""Runs the benchmark of a name."""
