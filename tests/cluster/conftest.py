"""A Ray cluster of three nodes on this machine, for the tests of a session. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from tests.service.support.databases import free_port

TOKEN = "0123456789abcdef" * 4
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_gcs_server_request_timeout_seconds": "60",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_storage": "rocksdb",
}
HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 5}
MEMORY = 100 << 20
"""Bytes of each node's object store, which is hardly used."""
NODE_START_S = 300.0
"""Longest time for a node to join: Ray's own 30 s are too few on a busy machine, and no setting changes them."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster: a head without cores for processes, and nodes with two each."""

    cluster: Any
    nodes: list[Any]

    @property
    def address(self) -> str:
        return self.cluster.address

    def add_node(self, cores: int = 2, gpus: int = 0) -> Any:
        """Another machine. Its GPUs are only counted: nothing may compute on them."""
        node = self.cluster.add_node(num_cpus=cores, num_gpus=gpus, object_store_memory=MEMORY)
        self.nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        """Kill a node's raylet with SIGKILL, as a machine that stops."""
        node.kill_raylet(check_alive=False)
        self.nodes.remove(node)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """The cluster; its address is for `cluster.address`."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'tinsmith[cluster]'")
    with running_cluster() as cluster:
        yield cluster


def wait_for_node(patch: pytest.MonkeyPatch) -> None:
    """Have Ray wait NODE_START_S for a node that it starts."""
    from ray._private import services

    get_node = services.get_node

    def patient(gcs_address: str, node_id: str) -> Any:
        end = time.monotonic() + NODE_START_S
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)

    patch.setattr(services, "get_node", patient)


@contextmanager
def running_cluster() -> Iterator[RayCluster]:
    """A cluster of three nodes for the duration of the block."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short: UNIX sockets allow 107 bytes
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "RAY_gcs_storage_path": f"{folder}/gcs"}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster  # Ray reads its variables when it is imported

        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)  # leave other clusters' file alone
        wait_for_node(patch)
        head = {
            "num_cpus": 0,
            "object_store_memory": MEMORY,
            "include_dashboard": False,
            "gcs_server_port": free_port(),  # the same one when it is started again
            "temp_dir": folder,
            "_system_config": HEALTH,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        running = RayCluster(cluster, [])
        try:
            for _ in range(2):
                running.add_node()
            yield running
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
    assert "RAY_AUTH_TOKEN" not in os.environ
