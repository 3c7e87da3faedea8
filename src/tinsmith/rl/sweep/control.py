"""Runs the members of a sweep: each is a process of its own, and all train at one service at the same time.

A process of its own gives each run what a run needs for itself: its guards against user code, its signals, its global
random generators, its working folder. A run that fails fails alone. To end one early, it gets SIGTERM, and saves a
checkpoint as any run does; it is continued by starting it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.sweep.folder import RunRecord, Status, SweepFolder, SweepRecord
from tinsmith.rl.sweep.halving import Curve, Progress, kept_settings
from tinsmith.rl.sweep.members import Member
from tinsmith.terminal import REFUSED, STOPPED_EARLY, TRAINED_NOTHING

POLL_SECONDS = 0.5
_DONE = ("finished", "ended", "failed")


class Child(Protocol):
    """The process of a run; subprocess.Popen is one."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """When settings end early, and by what.

    Example: Halving(metric="eval/reward/mean", share=3, steps=(20, 60))
    """

    metric: str
    share: int
    """1 of `share` settings goes on."""
    steps: tuple[int, ...]
    lower: bool = False

    def words(self, members: Sequence[Member]) -> str:
        """What its decisions depend on."""
        settings = sorted({member.combination.setting for member in members})
        direction = "lower" if self.lower else "higher"
        return f"{direction} {self.metric}, 1 of {self.share}, after {self.steps}, of {', '.join(settings)}"


@dataclass(slots=True, kw_only=True)
class SweepRun:
    """A sweep in progress."""

    members: Sequence[Member]
    folder: SweepFolder
    start: Callable[[Member, RunRecord], Child]
    at_once: int
    """Largest number of runs at a time."""
    report: Callable[[str], None]
    servers: Sequence[str] = ()
    """URLs of the servers that the runs are divided among; none: they share the service of the sweep."""
    halving: Halving | None = None
    stop: StopSignal = field(default_factory=StopSignal)
    sleep: Callable[[float], None] = time.sleep
    refused: set[str] = field(default_factory=set, init=False)
    """Runs that failed on their settings or files, and would again."""
    _children: dict[str, Child] = field(default_factory=dict, init=False)
    _stopping: set[str] = field(default_factory=set, init=False)
    """Runs that were sent SIGTERM."""
    _curves: dict[str, tuple[int, Curve]] = field(default_factory=dict, init=False)
    _record: SweepRecord = field(default_factory=SweepRecord, init=False)

    def run(self) -> Mapping[str, Status]:
        """Run every member to its end, or until the sweep is stopped. Returns how each stands then."""
        self._load()
        try:
            while self._children or (not self.stop.requested and self._waiting()):
                self._reap()
                if self.stop.requested:
                    self._terminate(list(self._children))
                else:
                    self._halve()
                    self._make_room()
                    for member in self._waiting()[: self.at_once - len(self._children)]:
                        self._begin(member)
                if self._children:
                    self.sleep(POLL_SECONDS)
        finally:
            for child in self._children.values():
                with suppress(OSError):
                    child.kill()
        return {name: self._record.runs[name].status for name in self._by_name()}

    def _by_name(self) -> dict[str, Member]:
        return {member.name: member for member in self.members}

    def _load(self) -> None:
        """The record of the folder; runs that are not finished wait."""
        record, words = self.folder.read(), self.halving.words(self.members) if self.halving else ""
        if record.decided and record.halving != words:
            raise ConfigError(
                f"{self.folder.path} has ended runs by other rules: {record.halving}.",
                "Restore the command, or set --out to another folder.",
            )
        runs = dict(record.runs)
        for number, member in enumerate(self.members):
            before = runs.get(member.name) or RunRecord()
            before = before.model_copy(update={"server": self._server(number, member, before)})
            finished = before.status == "finished" and before.digest == member.digest
            keeps = finished or before.status == "ended"
            runs[member.name] = before if keeps else before.model_copy(update={"status": "waiting"})
        self._record = record.model_copy(update={"runs": runs, "halving": words})
        self.folder.write(self._record)

    def _server(self, number: int, member: Member, before: RunRecord) -> str:
        """The server of a run: the one that has its checkpoints, if it has any."""
        if before.server in self.servers or (before.server == "" and not self.servers):
            return before.server
        if member.step:
            place = before.server or "the service of the sweep"
            raise ConfigError(
                f"{member.name} has begun on {place}, which has its checkpoints.",
                f"Set --server {before.server} too." if before.server else "Leave out --server.",
            )
        return self.servers[number % len(self.servers)] if self.servers else ""

    def _set(self, member: Member, status: Status) -> None:
        digest = member.digest if status == "finished" else ""
        changed = self._record.runs[member.name].model_copy(update={"status": status, "digest": digest})
        self._record.runs[member.name] = changed
        self.folder.write(self._record)

    def _status(self, member: Member) -> Status:
        return self._record.runs[member.name].status

    def _begin(self, member: Member) -> None:
        self._set(member, "running")
        self._children[member.name] = self.start(member, self._record.runs[member.name])

    def _reap(self) -> None:
        """Take note of the runs whose processes have ended."""
        for name, child in list(self._children.items()):
            if (code := child.poll()) is None:
                continue
            del self._children[name]
            member, early = self._by_name()[name], name in self._stopping
            self._stopping.discard(name)
            if code in (0, TRAINED_NOTHING):
                self._set(member, "finished")
                self.report(f"{name}: finished{', and has learned nothing' if code else ''}")
            elif self._status(member) == "ended":
                pass
            elif code == STOPPED_EARLY or (early and code < 0):
                self._set(member, "waiting" if early and not self.stop.requested else "stopped")
            else:
                self._set(member, "failed")
                self.refused |= {name} if code == REFUSED else set()
                self.report(f"{name}: failed with exit code {code}: {self.folder.last_words(name)}")

    def _waiting(self) -> list[Member]:
        """Runs to start, those first that others wait for."""
        step = self._next_decision()
        waiting = [member for member in self.members if self._status(member) == "waiting"]
        return sorted(waiting, key=lambda member: self._reached(member, step))

    def _next_decision(self) -> int:
        """The first step that is not decided; 0 if there is none."""
        steps = self.halving.steps if self.halving else ()
        return next((step for step in steps if step not in self._record.decided), 0)

    def _reached(self, member: Member, step: int) -> bool:
        if not step or self.halving is None:
            return False
        return self._progress(member, self.halving).reached(step)

    def _progress(self, member: Member, halving: Halving) -> Progress:
        """How far a run has come; its metrics are read when there are new ones."""
        size, status = member.bytes_of_metrics, self._status(member)
        if self._curves.get(member.name, (-1,))[0] != size:
            self._curves[member.name] = size, member.curve(halving.metric)
        return Progress(self._curves[member.name][1], ended=status in _DONE, failed=status == "failed")

    def _make_room(self) -> None:
        """Have runs that wait for a decision give their place to those that it waits for."""
        step = self._next_decision()
        needed = [member for member in self._waiting() if not self._reached(member, step)]
        free = self.at_once - len(self._children) + len(self._stopping)
        if not step or len(needed) <= free:
            return
        at_rest = [name for name in self._children if self._reached(self._by_name()[name], step)]
        self._terminate(at_rest[: len(needed) - free])

    def _halve(self) -> None:
        """Decide what can be decided, and end the runs that do not go on."""
        while (halving := self.halving) is not None and (step := self._next_decision()):
            going_on = next((names for _, names in sorted(self._record.decided.items(), reverse=True)), None)
            runs = dict[str, list[Progress]]()
            for member in self.members:
                if going_on is None or member.combination.setting in going_on:
                    runs.setdefault(member.combination.setting, []).append(self._progress(member, halving))
            if (remaining := kept_settings(runs, step, halving.share, lower=halving.lower)) is None:
                return
            self._record.decided[step] = remaining
            self.report(
                f"after step {step}, {len(remaining)} of {counted(len(runs), 'setting')} go on: {'; '.join(remaining)}"
            )
            self._end([member for member in self.members if member.combination.setting not in remaining])
            self.folder.write(self._record)

    def _end(self, members: Sequence[Member]) -> None:
        ending = [member for member in members if self._status(member) in ("waiting", "running")]
        for member in ending:
            self._record.runs[member.name] = self._record.runs[member.name].model_copy(update={"status": "ended"})
        self._terminate([member.name for member in ending if member.name in self._children])

    def _terminate(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._stopping:
                self._stopping.add(name)
                self._children[name].terminate()
