"""Faults of the nodes of the Ray cluster of conftest: of node agents, raylets and the head."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from tests.cluster.conftest import RayCluster

NODE_AGENT = "ray::RayNodeAgent"
ENGINE = "tinsmith.engine.cluster."
GONE_S = 10.0
"""Longest time that a process may outlive its node agent or its raylet: a node agent looks five times a second."""
HEAD_AWAY_S = 2.0


class RayMachines:
    """Implements `tests.faults.run.Machines`."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def engines(self) -> list[int]:
        return [process.pid for process in self._below(self._cluster.nodes, ENGINE)]

    def kill(self, kind: str, choice: float) -> None:
        if kind == "kill_head":
            head = self._cluster.cluster.head_node
            head.kill_gcs_server(check_alive=False)
            time.sleep(HEAD_AWAY_S)
            head.start_gcs_server()
        elif kind == "kill_raylet":
            node = self._cluster.nodes[int(choice * len(self._cluster.nodes))]
            kept_processes = self._below([node], ENGINE) + self._below([node], NODE_AGENT)
            self._cluster.kill(node)
            _assert_gone(kept_processes)
            self._cluster.add_node()
        elif agents := self._below(self._cluster.nodes, NODE_AGENT):
            agent = agents[int(choice * len(agents))]
            kept_processes = _matching(agent, ENGINE)
            agent.kill()
            _assert_gone(kept_processes)

    def stop(self, kind: str, choice: float) -> Callable[[], None]:
        if kind == "stop_raylet":
            node = self._cluster.nodes[int(choice * len(self._cluster.nodes))]
            stopped = [raylet_of(node)]
        else:
            agents = self._below(self._cluster.nodes, NODE_AGENT)
            stopped = [agents[int(choice * len(agents))]] if agents else []
        _signal(stopped, signal.SIGSTOP)
        return lambda: _signal(stopped, signal.SIGCONT)

    def _below(self, nodes: list[Any], part: str) -> list[psutil.Process]:
        """Processes of these nodes whose command line has a part."""
        return [process for node in nodes for process in _matching(raylet_of(node), part)]


def raylet_of(node: Any) -> psutil.Process:
    """The raylet of a node, which all its processes descend from."""
    [info] = node.all_processes["raylet"]
    return psutil.Process(info.process.pid)


def _matching(parent: psutil.Process, part: str) -> list[psutil.Process]:
    matching = []
    with suppress(psutil.NoSuchProcess):
        for process in parent.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if part in " ".join(process.cmdline()):
                    matching.append(process)
    return sorted(matching, key=lambda process: process.pid)


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _assert_gone(processes: list[psutil.Process]) -> None:
    """Raise AssertionError if one of the processes still computes; what waits only to be reaped holds nothing."""
    end = time.monotonic() + GONE_S
    while left := [process for process in processes if _runs(process)]:
        assert time.monotonic() < end, f"{left} outlive what kept them"
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
