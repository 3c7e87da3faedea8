"""Kills of the processes of a cluster under the load of the fault suite: no law of the service is broken.

`python -m tests.cluster.test_faults --kills 200 --seed 3` does a run by hand and prints its report: two training and
two sampling processes of a tiny model on this machine, with `--ray` on three nodes of a Ray cluster, with `--fake` one
training process and two sampling processes of the fake engine. With `--store` the processes do not see the data folder,
and adapters go through an object store. `--add` adds the run to benchmarks/results/faults.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import forkserver
from tests.cluster.conftest import RayCluster, running_cluster
from tests.cluster.hidden import blind_python, can_hide
from tests.cluster.machines import RayMachines
from tests.faults.plan import Plan
from tests.faults.report import read_reports, write_reports
from tests.faults.run import Machines, Report, Run, fake_config, group_config, quieten
from tests.models import save_model
from tinsmith.engine.cluster.config import ClusterConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:DEPRECATED"),  # load_state of the SDK
    pytest.mark.timeout(1200),
]

WEIGHTS = {"kill_process": 70, "kill_engine": 10, "kill_api": 12, "kill_both": 4, "stop_engine": 4}
"""`kill_process` kills one process of several; `kill_engine` kills all of them."""
GROUP = {**WEIGHTS, "stop_process": 6, "stall_process": 2, "stop_api": 2}
RAY = {
    **{"kill_process": 60, "kill_node_agent": 12, "kill_raylet": 6, "kill_head": 6, "kill_api": 6, "kill_engine": 6},
    **{"stop_process": 6, "stall_process": 3, "stop_node_agent": 3, "stop_raylet": 3, "stop_api": 2},
}
TOLERANCE = 1e-5
"""Of the log-probabilities of samples: what else a replica samples changes how its sums round."""


def run_fake(folder: Path, seed: int, count: int, *, tenants: int = 3) -> Report:
    """Carry out a plan of kills on a service with one training process and two sampling processes of fake engines."""
    quieten()
    plan = Plan.draw(seed, count, WEIGHTS, longest_s=1.5)
    config = fake_config(folder / "data").model_copy(update={"cluster": ClusterConfig(samplers=2)})
    return Run(folder, plan, tenants, config).run(_print)


def run_group(
    folder: Path,
    model: Path,
    seed: int,
    count: int,
    *,
    tenants: int = 3,
    weights: Mapping[str, int] = GROUP,
    address: str | None = None,
    machines: Machines | None = None,
) -> Report:
    """Carry out a plan of kills on a service with two ranks and two sampling processes of the torch engine."""
    quieten()
    plan = Plan.draw(seed, count, weights, longest_s=3.0)
    cluster = ClusterConfig(address=address, trainers=2, shards=2, samplers=2)
    config = group_config(folder / "data", model, cluster)
    return Run(folder, plan, tenants, config, sampling_tolerance=TOLERANCE, machines=machines).run(_print)


def run_store(
    folder: Path, model: Path, seed: int, count: int, *, tenants: int = 3, weights: Mapping[str, int] = GROUP
) -> Report:
    """Carry out a plan of kills on a service whose processes do not see its data folder, nor each other's disks."""
    quieten()
    plan = Plan.draw(seed, count, weights, longest_s=3.0)
    cluster = ClusterConfig(trainers=2, shards=2, samplers=2, cache=folder / "cache")
    config = group_config(folder / "data", model, cluster, (folder / "store").as_uri())
    blind = blind_python(folder, folder / "data", folder / "cache")
    return Run(folder, plan, tenants, config, sampling_tolerance=TOLERANCE, blind=blind).run(_print)


def _print(number: int) -> None:
    print(f"{number} faults", flush=True)


@pytest.mark.usefixtures("forked_programs")
def test_kills_of_processes_break_no_law(tmp_path: Path) -> None:
    report = run_fake(tmp_path, 18, 20)
    assert report.violations == []
    assert report.kills >= 18
    assert report.rounds > 0


@pytest.mark.usefixtures("forked_programs")
def test_kills_of_ranks_and_replicas_break_no_law(tmp_path: Path, tiny_llama: Path) -> None:
    """Fails if a group counts as dead before all its ranks are gone (`rank.close` in `GroupEngine._end_together`), or
    if a replay cuts rows into other shards (`ClusterConfig.shards_of_rows`)."""
    report = run_group(tmp_path, tiny_llama, 18, 16)
    assert report.violations == []
    assert report.kills >= 12
    assert report.rounds > 0


def test_kills_without_a_shared_folder_break_no_law(tmp_path: Path, tiny_llama: Path) -> None:
    """Fails if a replay or a moved process looks for an object where its writer had it (`CachedEngine._fetched`)."""
    if not can_hide():
        pytest.skip("needs user namespaces (unshare)")
    report = run_store(tmp_path, tiny_llama, 18, 12)
    assert report.violations == []
    assert report.kills >= 9
    assert report.rounds > 0


def test_kills_on_a_ray_cluster_break_no_law(tmp_path: Path, tiny_llama: Path, ray_cluster: RayCluster) -> None:
    machines = RayMachines(ray_cluster)
    kinds = dict.fromkeys(RAY, 1)
    report = run_group(
        tmp_path, tiny_llama, 18, len(kinds), weights=kinds, address=ray_cluster.address, machines=machines
    )
    assert report.violations == []
    assert set(report.faults) >= set(kinds)
    assert report.rounds > 0


def main() -> None:
    """Do one run and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--tenants", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster of three nodes on this machine")
    parser.add_argument("--fake", action="store_true", help="with the fake engine, whose trainer is one process")
    parser.add_argument("--store", action="store_true", help="without a shared folder, through an object store")
    parser.add_argument("--add", action="store_true", help="add the run to benchmarks/results/faults")
    parser.add_argument("--folder", type=Path, help="keep data, references and log here")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        report = _run_by_hand(options, folder, stack)
    print(json.dumps(asdict(report), indent=1))
    if options.add:
        write_reports([*read_reports(), report])
    raise SystemExit(bool(report.violations))


def _run_by_hand(options: argparse.Namespace, folder: Path, stack: ExitStack) -> Report:
    if options.ray:
        cluster = stack.enter_context(running_cluster())
        model = save_model("llama", folder / "model")
        return run_group(
            folder,
            model,
            options.seed,
            options.kills,
            tenants=options.tenants,
            weights=RAY,
            address=cluster.address,
            machines=RayMachines(cluster),
        )
    if options.store:
        model = save_model("llama", folder / "model")
        return run_store(folder, model, options.seed, options.kills, tenants=options.tenants)
    sys.executable = stack.enter_context(forkserver.python(folder))
    if options.fake:
        return run_fake(folder, options.seed, options.kills, tenants=options.tenants)
    model = save_model("llama", folder / "model")
    return run_group(folder, model, options.seed, options.kills, tenants=options.tenants)


if __name__ == "__main__":
    main()
