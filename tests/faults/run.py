"""One run: tenants use a service through the proxy while a plan of faults is carried out; then the laws are checked.

`python -m tests.faults.run --faults 500 --seed 3` does a run by hand and prints its plan and its report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from tests.cluster.hidden import BlindPython
from tests.faults import laws
from tests.faults.clients import Tenant
from tests.faults.plan import (
    KILLS,
    MACHINE_KILLS,
    PART_STOPS,
    PROCESS_KILLS,
    REQUEST_FAULTS,
    STOPS,
    Fault,
    Plan,
)
from tests.faults.proxy import Proxy
from tests.faults.reference import Reference
from tests.faults.service import ServiceProcess
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.service.config import ServeConfig
from tinsmith.service.tenancy.keys import create_key, open_key_database

ADMIN_KEY = "tml-admin-of-the-fault-suite"
ENGINE_TIMEOUT_S = 3.0
"""Longer than a stop of the engine that is no stall."""
GROUP_TIMEOUT_S = 12.0
"""The same for processes that compute on busy cores."""
END_S = 600.0
"""Longest time from the last fault until every tenant has finished its round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run did and saw."""

    seed: int
    engine: str
    tenants: int
    seconds: float
    faults: dict[str, int]
    request_faults: dict[str, int]
    """Requests that a fault of the proxy has hit."""
    operations: dict[str, int]
    rounds: int
    checkpoints: int
    start_s: float
    """Median time of a start of the service after a kill."""
    violations: list[str] = field(default_factory=list)
    processes: str = "one engine"
    """Processes of its engine."""
    during: dict[str, int] = field(default_factory=dict)
    """Operations of tenants that were under way when a process was killed or stopped."""
    stacks: list[str] = field(default_factory=list)
    """Stacks of the clients when an operation of one had taken too long, as lines."""

    @property
    def kills(self) -> int:
        """Faults that killed a process or several."""
        return sum(self.faults.get(kind, 0) for kind in (*KILLS, *PROCESS_KILLS, *MACHINE_KILLS))

    @property
    def stops(self) -> int:
        """Faults that stopped a process for a while."""
        return sum(self.faults.get(kind, 0) for kind in (*STOPS, *PART_STOPS))


class Machines(Protocol):
    """The machines of a cluster, and faults of what belongs to them."""

    def engines(self) -> list[int]:
        """Process ids of the engine's processes on them."""
        ...

    def kill(self, kind: str, choice: float) -> None:
        """Carry out one of MACHINE_KILLS; raises AssertionError if a process outlives it."""
        ...

    def stop(self, kind: str, choice: float) -> Callable[[], None]:
        """SIGSTOP a node agent or a raylet. Returns a function that lets it continue."""
        ...


class Run:
    """A service, its proxy and its tenants."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        tenants: int,
        config: ServeConfig,
        *,
        sampling_tolerance: float = 0.0,
        machines: Machines | None = None,
        blind: BlindPython | None = None,
    ) -> None:
        """`machines`: those of the cluster of `config`. `blind`: for processes that do not see the data folder."""
        self._plan = plan
        self.config = config
        self._machines, self._blind = machines, blind
        engines = machines.engines if machines is not None else None
        self._service = ServiceProcess(config, engines, blind.path if blind is not None else None)
        self._proxy = Proxy(plan.seed)
        self._proxy.forward_to(self._service.config.port)
        names = [f"tenant-{number}" for number in range(tenants)]
        keys = asyncio.run(make_keys(config.data, names))
        [source] = config.sources()
        self.references = [
            Reference(config.engine_config(source), folder / "reference" / name, config.cluster) for name in names
        ]
        self.tenants = [
            Tenant(name, self._proxy.url, key, plan.seed, reference, sampling_tolerance=sampling_tolerance)
            for name, key, reference in zip(names, keys, self.references, strict=True)
        ]
        self._done: Counter[str] = Counter()
        self._during: Counter[str] = Counter()

    def run(self, on_fault: Callable[[int], None] = lambda number: None) -> Report:
        """Carry out the plan, check the laws, and end everything."""
        start = time.monotonic()
        try:
            violations = self._run(on_fault)
        finally:
            self._service.close()
            self._proxy.close()
            for reference in self.references:
                reference.close()
        operations = sum((tenant.done for tenant in self.tenants), Counter[str]())
        return Report(
            seed=self._plan.seed,
            engine=self.config.engine,
            tenants=len(self.tenants),
            seconds=round(time.monotonic() - start, 1),
            faults=dict(self._done),
            request_faults=dict(self._proxy.done),
            operations=dict(operations),
            rounds=sum(tenant.rounds for tenant in self.tenants),
            checkpoints=sum(len(tenant.checkpoints) for tenant in self.tenants),
            start_s=round(median(self._service.starts_s), 2),
            violations=violations,
            processes=_describe(self.config),
            during=dict(self._during),
            stacks=next((tenant.stacks for tenant in self.tenants if tenant.stacks), []),
        )

    def _run(self, on_fault: Callable[[int], None]) -> list[str]:
        self._service.start()
        self._service.wait_until_ready()
        for tenant in self.tenants:
            tenant.start()
        for number, fault in enumerate(self._plan.faults):
            if self._violations():
                break
            self._apply(fault)
            on_fault(number + 1)
        self._proxy.disarm()
        self._service.set_clock(0.0)
        self._service.wait_until_ready()
        before = self._service.memory()
        for tenant in self.tenants:
            tenant.end()
        end = time.monotonic() + END_S
        for tenant in self.tenants:
            tenant.join(max(end - time.monotonic(), 1.0))
        return self._violations() or self._check_laws(before)

    def _violations(self) -> list[str]:
        return [tenant.violation for tenant in self.tenants if tenant.violation is not None]

    def _check_laws(self, before: int) -> list[str]:
        data, url = self.config.data, f"http://127.0.0.1:{self._service.config.port}"
        return [
            *laws.open_requests(data),
            *laws.leaks(self.tenants, url),
            *laws.unlisted_checkpoints(self.tenants, url),
            *laws.lost_checkpoints(self.tenants, data, self.config.store),
            *laws.leftovers(self.tenants, data, url, ADMIN_KEY),
            *laws.memory_growth(before, self._service.memory()),
            *(laws.faulty_objects(data, str(self.config.store), self._blind.caches) if self._blind else ()),
        ]

    def _apply(self, fault: Fault) -> None:
        if not fault.early:
            self._service.wait_until_ready()
            if not self.config.cluster.is_single:
                self._service.wait_until_loaded(self.config.cluster.trainers + self.config.cluster.samplers)
        time.sleep(fault.after_s)
        if fault.kind not in REQUEST_FAULTS:
            self._during.update(tenant.now for tenant in self.tenants)
        self._carry_out(fault)
        self._done[fault.kind] += 1

    def _carry_out(self, fault: Fault) -> None:
        if fault.kind in KILLS:
            self._service.kill(api=fault.kind != "kill_engine", engine=fault.kind != "kill_api")
            if fault.kind != "kill_engine":
                self._service.start()
        elif fault.kind == "kill_process":
            self._service.kill_process(fault.choice)
        elif fault.kind in MACHINE_KILLS:
            assert self._machines is not None
            self._service.note_death()
            self._machines.kill(fault.kind, fault.choice)
        elif fault.kind in REQUEST_FAULTS:
            self._proxy.arm(fault.kind, fault.requests, fault.lasts_s)
        elif fault.kind == "stall_process":
            self._done["watchdog"] += self._service.stall_process(fault.choice)
        elif fault.kind == "stall_engine":
            self._done["watchdog"] += self._service.stall_engine()
        else:
            self._begin(fault)()

    def _begin(self, fault: Fault) -> Callable[[], None]:
        """Begin a fault that lasts. Returns a function that waits and ends it."""
        if fault.kind == "clock":
            return lambda: self._service.set_clock(fault.offset_s)
        if fault.kind == "cut_all":
            return self._proxy.cut_all
        if fault.kind == "disk_full":
            undo = self._service.fill_disk()
        elif fault.kind == "stop_process":
            undo = self._service.stop_process(fault.choice)
        elif fault.kind in PART_STOPS:
            assert self._machines is not None
            undo = self._machines.stop(fault.kind, fault.choice)
        else:
            undo = self._service.stop(engine=fault.kind == "stop_engine")

        def end() -> None:
            time.sleep(fault.lasts_s)
            undo()

        return end


def _describe(config: ServeConfig) -> str:
    """The processes of an engine, such as `2 trainers, 2 samplers, on Ray`."""
    cluster = config.cluster
    if cluster.is_single:
        return "one engine"
    trainers = f"{cluster.trainers} trainer{'s' * (cluster.trainers > 1)}"
    slots = ", on Ray" * (cluster.address is not None) + ", through a store" * (config.store is not None)
    return f"{trainers}, {cluster.samplers} samplers{slots}"


async def make_keys(data: Path, names: list[str]) -> list[str]:
    """API keys of new tenants."""
    data.mkdir(parents=True, exist_ok=True)
    async with open_key_database(data, None) as engine:
        return [(await create_key(engine, name, name))[0] for name in names]


def fake_config(data: Path) -> ServeConfig:
    """A service of the model `toy` whose engine is fake, and captures and replays often."""
    return ServeConfig(
        models=("toy",),
        engine="fake",
        data=data,
        api_key=ADMIN_KEY,
        hold_s=3.0,
        capture_every=4,
        engine_timeout_s=ENGINE_TIMEOUT_S,
        log_level="warning",
    )


def group_config(data: Path, model: Path, cluster: ClusterConfig, store: str | None = None) -> ServeConfig:
    """A service of the model `toy` with several processes, in deterministic mode. `store`: URL of an object store."""
    config = torch_config(data, model)
    changes = {"cluster": cluster, "deterministic": True, "pass_tokens": 64, "engine_timeout_s": GROUP_TIMEOUT_S}
    return ServeConfig(**(config.model_dump() | changes | {"store": store}))


def torch_config(data: Path, model: Path) -> ServeConfig:
    """A service of the model `toy` with the real engine, in float32 on one thread."""
    config = fake_config(data)
    changes = {
        "models": (f"toy={model}",),
        "engine": "torch",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "engine_timeout_s": 120.0,
    }
    return ServeConfig(**(config.model_dump() | changes))


def main() -> None:
    """Do one run and print its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--add", action="store_true", help="add the run to benchmarks/results/faults")
    parser.add_argument("--folder", type=Path, help="keep data, references and log here")
    arguments = parser.parse_args()
    quieten()
    plan = Plan.draw(arguments.seed, arguments.faults)
    print(plan, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        run = Run(folder, plan, arguments.tenants, fake_config(folder / "data"))
        report = run.run(lambda number: print(f"\r{number}", end="", flush=True))
    print("\n" + json.dumps(asdict(report), indent=1))
    if arguments.add:
        from tests.faults.report import read_reports, write_reports

        write_reports([*read_reports(), report])
    raise SystemExit(bool(report.violations))


def quieten() -> None:
    """Silence the SDK's warnings about lost connections."""
    for name in ("tinker", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    main()
