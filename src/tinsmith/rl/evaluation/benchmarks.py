"""The benchmarks of a run file, against the endpoint of the run: their settings, scores, metrics and comparison.

A benchmark runs in a program of its own (`program.py`): the libraries are written for scripts, and a run
that stops ends the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field, model_validator

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError, UserError
from tinsmith.processes.start import start_watched_child
from tinsmith.rl.evaluation.endpoint import PROGRAM_ERRORS, REQUEST_FILE, Endpoint, Sampling
from tinsmith.rl.evaluation.libraries import is_inspect
from tinsmith.rl.evaluation.scores import Attempt, Scores, estimates, from_json, measures, to_json
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.record.comparison import EvaluationComparison
from tinsmith.rl.record.layout import Layout
from tinsmith.settings import Settings

METRICS = "eval/benchmark"
"""Prefix of the metrics."""
REPLY_TOKENS = 2048
"""Largest number of tokens of an answer where neither the run file nor the benchmark sets one."""


class Benchmark(Settings):
    """A benchmark of lm-evaluation-harness or of Inspect. A text alone is its name."""

    name: str = Field(min_length=1)
    """Name: of a task or group of lm-evaluation-harness, such as gsm8k, or PACKAGE/TASK or FILE.py@TASK of Inspect."""
    num_samples: int = Field(default=1, ge=1)
    """Answers to each problem."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; not set: the benchmark's own, mostly 0."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens in an answer; not set: the benchmark's own."""
    limit: int = Field(default=0, ge=0)
    """Use only this many problems of each task, the first ones; 0: all."""
    chat: bool = False
    """Send the prompts of lm-evaluation-harness through the model's chat template; Inspect always does."""
    include: str = ""
    """Folder with tasks of your own for lm-evaluation-harness (YAML), which may name local data."""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _check(self) -> Benchmark:
        if self.num_samples > 1 and not self.temperature:
            raise ValueError("num_samples above 1 needs a temperature above 0, because greedy answers are identical")
        if self.include and not Path(self.include).is_dir():
            raise ValueError(f"include: there is no folder {self.include}")
        if is_inspect(self.name) and (self.chat or self.include):
            key = "chat" if self.chat else "include"
            raise ValueError(f"{key} is not used with {self.name}, a task of Inspect; leave it out")
        return self

    def sampling(self, seed: int) -> Sampling:
        """How it is sampled."""
        return Sampling(
            samples=self.num_samples,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            limit=self.limit or None,
            chat=self.chat,
            include=Path(self.include) if self.include else None,
            seed=seed,
        )


async def run_on_policy(
    benchmarks: Sequence[Benchmark], policy: Snapshot, endpoint: AgentEndpoint, seed: int
) -> dict[str, Mapping[str, Sequence[Attempt]]]:
    """The scores of the policy on benchmarks, one after the other, which reach it by the endpoint of the run."""
    scores: dict[str, Mapping[str, Sequence[Attempt]]] = {}
    with TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        if benchmarks:
            policy.chat.save_tokenizer(tokenizer)
        for number, benchmark in enumerate(benchmarks):
            # What a request leaves out is as the server's OpenAI API has it.
            sampling = SamplingConfig(max_tokens=benchmark.max_tokens or REPLY_TOKENS)
            async with endpoint.session(policy, sampling, seed, limit=1) as session:
                target = Endpoint(
                    url=session.base_url.removesuffix("/v1"),
                    key=session.api_key,
                    model=session.model,
                    tokenizer=tokenizer,
                )
                made = await _in_program(benchmark, target, seed, Path(folder) / str(number))
            if twice := sorted(made.keys() & scores.keys()):
                raise ConfigError(
                    f"eval.benchmarks: {benchmark.name} has {twice[0]}, as an earlier one.", "Leave out one of them."
                )
            scores |= made
    return scores


async def _in_program(benchmark: Benchmark, endpoint: Endpoint, seed: int, result: Path) -> Scores:
    """The scores of a benchmark, run by a program of its own, which is ended if this is cancelled."""
    request = {
        "name": benchmark.name,
        "endpoint": asdict(endpoint),
        "sampling": asdict(benchmark.sampling(seed)),
        "result": result,
    }
    log, request_file = result.with_suffix(".log"), result.with_suffix(".request")
    request_file.write_text(json.dumps(request, default=str), encoding="utf-8")
    with log.open("wb") as output:
        process = await start_watched_child(
            "tinsmith.rl.evaluation.program", environment={REQUEST_FILE: str(request_file)}, log=output.fileno()
        )
        try:
            await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if not result.exists():
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise UserError(
            f"The benchmark {benchmark.name} ended without scores: {lines[-1] if lines else 'no message'}.",
            f"Try it alone: tinsmith eval MODEL {benchmark.name}.",
        )
    values = json.loads(result.read_bytes())
    if "error" in values:
        kind = next(each for each in PROGRAM_ERRORS if each.__name__ == values["error"])
        raise kind(values["message"], values["hint"])
    return from_json(values["scores"])


def metrics_of(scores: Scores) -> dict[str, float]:
    """The metrics of scores: the mean of each, and pass@k and maj@k of several answers.

    Example: metrics_of({"gsm8k exact_match (strict)": {…}}) == {"eval/benchmark/gsm8k/exact_match/strict": 0.25}
    """
    metrics = {}
    for benchmark, problems in scores.items():
        name = f"{METRICS}/{benchmark.replace(' (', '/').removesuffix(')').replace(' ', '/')}"
        for measure, values in measures(problems).items():
            end = "" if measure.startswith("avg@") else f"/{measure}"
            metrics[f"{name}{end}"] = sum(values.values()) / len(values)
    return metrics


def write(folder: Path, step: int, scores: Scores) -> None:
    """Write the scores of an evaluation to the run folder, if there are any."""
    if scores:
        file = Layout(folder).benchmarks(step)
        file.parent.mkdir(exist_ok=True)
        atomic_write(file, to_json({"scores": scores}))


def compare_steps(folder: Path, last: int, seed: int) -> list[EvaluationComparison]:
    """The scores after step `last` against those before the first step, problem by problem, if both were made."""
    files = {f"step {step}": Layout(folder).benchmarks(step) for step in (0, last)}
    if not last or not all(file.exists() for file in files.values()):
        return []
    models = {name: from_json(json.loads(file.read_bytes())["scores"]) for name, file in files.items()}
    first, second = models
    return [
        EvaluationComparison(
            first=first, second=second, source=row.benchmark, measure=row.measure, result=row.against_first
        )
        for row in estimates(models, seed)
        if row.against_first is not None
    ]
