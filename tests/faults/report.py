"""Reports of long runs in benchmarks/results, by `--add`: faults and power-cuts, each as JSON and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.plan import REQUEST_FAULTS
from tests.faults.power.recovery import Cut
from tests.faults.power.session import Recording
from tests.faults.run import Report

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = {
    "kill_api": "SIGKILL of the API process",
    "kill_engine": "SIGKILL of the engine",
    "kill_both": "SIGKILL of both",
    "stop_api": "SIGSTOP of the API process for up to 1.5 s",
    "stop_engine": "SIGSTOP of the engine for up to 1.5 s",
    "stall_engine": "SIGSTOP of the engine for good",
    "kill_process": "SIGKILL of one process of an engine of several: a rank or a replica",
    "stop_process": "SIGSTOP of one for up to 1.5 s",
    "stall_process": "SIGSTOP of one for good",
    "watchdog": "… and the watchdog killed what was stopped for good",
    "kill_node_agent": "SIGKILL of a node agent",
    "stop_node_agent": "SIGSTOP of a node agent for up to 1.5 s",
    "kill_raylet": "SIGKILL of a raylet, as of a machine; another joins",
    "stop_raylet": "SIGSTOP of a raylet for up to 1.5 s",
    "kill_head": "SIGKILL of Ray's head (GCS), which is started again",
    "cut_all": "all connections cut",
    "disk_full": "no file can grow for up to 1 s",
    "clock": "wall clock moved by up to 25 minutes",
    "delay": "request delayed",
    "cut_before": "connection cut before the request",
    "cut_after": "connection cut before the answer",
    "truncate_request": "request cut in its middle",
    "truncate_response": "answer cut in its middle",
    "duplicate": "request sent twice at once",
    "duplicate_later": "request sent again up to 1.5 s later",
}


def read_reports() -> list[Report]:
    """The runs of the report."""
    file = RESULTS / "faults.json"
    return [Report(**run) for run in json.loads(file.read_text())] if file.is_file() else []


def write_reports(reports: Sequence[Report]) -> None:
    """Write the report of these runs."""
    (RESULTS / "faults.json").write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    (RESULTS / "faults.md").write_text("\n".join(lines(reports)) + "\n")


def lines(reports: Sequence[Report]) -> list[str]:
    """The tables as Markdown."""
    faults = sum((Counter(report.faults) for report in reports), Counter[str]())
    requests = sum((Counter(report.request_faults) for report in reports), Counter[str]())
    operations = sum((Counter(report.operations) for report in reports), Counter[str]())
    counts = [(name, requests[kind] if kind in REQUEST_FAULTS else faults[kind]) for kind, name in NAMES.items()]
    violations = [violation for report in reports for violation in report.violations]
    return [
        "# Runs with faults",
        "",
        f"Runs: {len(reports)} (seeds {', '.join(str(report.seed) for report in reports)}), "
        f"{sum(report.seconds for report in reports) / 60:.0f} minutes: {sum(report.kills for report in reports):,} "
        f"kills, {sum(report.stops for report in reports):,} stops, "
        f"{len(violations)} violation{'s' * (len(violations) != 1)}.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {count:,} |" for name, count in counts if count),
        "",
        *_setups(reports),
        "| checked | count |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {count:,} |" for name, count in sorted(operations.items())),
        f"| checkpoints, equal in every byte | {sum(report.checkpoints for report in reports):,} |",
        f"| sessions | {sum(report.rounds for report in reports):,} |",
        *(["", "Violations:", "", *(f"- {violation}" for violation in violations)] if violations else []),
    ]


def _setups(reports: Sequence[Report]) -> list[str]:
    """Tables of the runs by the processes of their engine, and of what faults came upon."""
    rows = []
    for processes in dict.fromkeys(report.processes for report in reports):
        runs = [report for report in reports if report.processes == processes]
        kills, stops = sum(run.kills for run in runs), sum(run.stops for run in runs)
        engines = ", ".join(sorted({run.engine for run in runs}))
        rows.append(f"| {processes} ({engines}) | {len(runs)} | {kills:,} | {stops:,} |")
    during = sum((Counter(report.during) for report in reports), Counter[str]())
    return [
        "| engine | runs | kills | stops |",
        "|---|---|---|---|",
        *rows,
        "",
        *(["| under way at a kill or stop | times |", "|---|---|"] if during else []),
        *(f"| {name.replace('_', ' ')} | {count:,} |" for name, count in during.most_common()),
        *([""] if during else []),
    ]


def write_power_report(recording: Recording, cuts: Sequence[Cut], violations: Sequence[str]) -> None:
    """Write the report of the power cuts that were tried."""
    operations = Counter(operation.kind for operation in recording.operations)
    answers = Counter(entry.kind for entry in recording.acknowledged)
    losses = Counter(cut.losses for cut in cuts)
    values = {"cuts": losses, "operations": operations, "answers": answers, "violations": list(violations)}
    (RESULTS / "power-cuts.json").write_text(json.dumps(values, indent=1) + "\n")
    table = [
        "# Power cuts",
        "",
        f"{len(cuts):,} power cuts at places among {sum(operations.values()):,} operations on the data folder "
        f"({operations['write']:,} writes, {operations['sync']:,} syncs, {operations['rename']:,} renames): "
        f"{len(violations)} violations.",
        "",
        "| unsynced writes and names | power cuts |",
        "|---|---|",
        f"| all lost | {losses['unsynced']:,} |",
        f"| some lost, by chance | {losses['some']:,} |",
        f"| none lost | {losses['nothing']:,} |",
    ]
    (RESULTS / "power-cuts.md").write_text("\n".join(table) + "\n")
