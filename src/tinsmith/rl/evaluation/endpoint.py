"""What a benchmark is run on: a model of a server, by its OpenAI API, and how it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


REQUEST_FILE = "TINSMITH_BENCHMARK_REQUEST"
"""Variable with the file of the request to the program that runs a benchmark."""
PROGRAM_ERRORS = (Unreachable, ConfigError, UserError)
"""Kinds of errors that the program returns, the narrower ones first."""
CONCURRENCY = 32
"""Open requests of a benchmark, at most."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How benchmarks are sampled; the options of `tinsmith eval`.

    Example: Sampling(samples=4, temperature=0.7, limit=100)
    """

    samples: int | None = None
    """Answers to each problem; several report avg@k, pass@k and maj@k. Default: 1, or as the run file has it."""
    temperature: float | None = None
    """Sampling temperature. Default: that of the benchmark or the run file, mostly 0."""
    max_tokens: int | None = None
    """Largest number of tokens in an answer. Default: that of the benchmark or the run file."""
    limit: int | None = None
    """Take only the first so many problems of each benchmark."""
    chat: bool = False
    """Send the prompts of lm-evaluation-harness through the model's chat template."""
    include: Path | None = None
    """Folder with tasks of your own for lm-evaluation-harness (YAML), which may name local data."""
    seed: int = 0
    """Seed of the answers and the intervals."""

    @property
    def count(self) -> int:
        """Answers to each problem of a benchmark."""
        return self.samples or 1

    def check(self, *, benchmarks: bool) -> None:
        """Raise ConfigError for a value that nothing can be sampled with; `benchmarks`: whether any is sampled."""
        values = (("samples", self.samples, 1), ("limit", self.limit, 1), ("max-tokens", self.max_tokens, 1))
        for name, value, least in (*values, ("temperature", self.temperature, 0)):
            if value is not None and value < least:
                raise ConfigError(f"--{name} is {value}.", f"Give {least} or more.")
        if self.count > 1 and (self.temperature == 0 or (self.temperature is None and benchmarks)):
            raise ConfigError("--samples above 1 needs --temperature above 0: greedy answers are identical.")
        if self.include is not None and not self.include.is_dir():
            raise ConfigError(f"--include: there is no folder {self.include}.")


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
