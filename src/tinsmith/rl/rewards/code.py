"""The reward of programs that a model writes: the tests of the task that they pass, run in a sandbox."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.rewards.base import Score
from tinsmith.rl.rewards.compared import PooledReward
from tinsmith.rl.sandbox.config import SandboxConfig
from tinsmith.rl.sandbox.tests import code_of, read_tests, run_tests
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.scoring.replies import after_thoughts
from tinsmith.rl.types import Rollout, Task

_RUN_TESTS = "tinsmith.rl.sandbox.tests:run_tests"


class CodeTests(PooledReward):
    """1 for a Python program that passes all tests of its task, else `partial` times the share that it passes.

    The program is the reply's last block of Python, else its last block, else the whole reply after its thoughts. Each
    test runs it in a new process in a sandbox. The reply is right if all tests pass.
    """

    type: Literal["code_tests"] = "code_tests"
    tests: str = "tests"
    """Field of `task.extra` with the tests: a list of statements such as `assert add(1, 2) == 3`, one text of
    statements, a list of {input, output}, or {inputs, outputs}; or one of these as JSON."""
    setup: str = ""
    """Field of `task.extra` with statements to execute before the program."""
    call: str = ""
    """Statement to execute after each test of statements, with fields of `task.extra` in braces, such as
    `check({entry_point})`."""
    max_tests: int = Field(default=20, ge=1)
    """Number of tests to run, the first ones of the task."""
    partial: float = Field(default=1.0, ge=0, le=1)
    """Factor of the share of passed tests, for a program that does not pass all; 0: only all tests count."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits of the program."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def score(self, task: Task, text: str) -> Score:
        arguments = self._arguments(task, text)
        return self._grade(run_tests(*arguments) if arguments[0].strip() else [False])

    @override
    async def judge_in(self, pool: ScoringPool, task: Task, rollout: Rollout) -> Score:
        arguments = self._arguments(task, rollout.text)
        return self._grade(await pool.call(_RUN_TESTS, *arguments, seconds=None) if arguments[0].strip() else [False])

    def _arguments(self, task: Task, text: str) -> tuple[str, str, list[dict[str, str]], dict[str, Any], bool]:
        """Arguments of `run_tests`, the program of the reply first. Raises ValueError for a task without tests."""
        if self.tests not in task.extra:
            raise ValueError(
                f"{task.id} has no field {self.tests!r} in extra; list it in `extra` of its source of tasks"
            )
        tests = read_tests(task.extra[self.tests], f"{self.tests} of {task.id}")[: self.max_tests]
        if self.call:
            try:
                line = self.call.format(**task.extra)
            except KeyError as error:
                raise ValueError(f"call: {task.id} has no field {error} in extra") from error
            tests = [
                {"statements": f"{each['statements']}\n{line}"} if "statements" in each else each for each in tests
            ]
        setup = str(task.extra.get(self.setup, "")) if self.setup else ""
        return code_of(after_thoughts(text)), setup, tests, self.sandbox.model_dump(), self.partial == 0

    def _grade(self, passed: list[bool]) -> Score:
        share = sum(passed) / len(passed)
        return Score(value=1.0 if all(passed) else self.partial * share, correct=all(passed), parts={"passed": share})
