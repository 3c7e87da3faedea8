"""Which slots a base model takes: GPUs of training and of sampling processes, and what vLLM gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.cluster.cluster import ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.launches import for_slot
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError

VLLM = VllmConfig(args=("--enforce-eager",))


def test_sampling_process_takes_several_gpus_tensor_parallel(
    tmp_path: Path, wait: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if samplers are given as many GPUs as trainers are, or vLLM does not get their number."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    config = EngineConfig(source="m", device="cuda", sampler="vllm", vllm=VLLM)
    slots = LocalSlots()
    cluster = ModelCluster(config, ClusterConfig(trainers=2, samplers=2, sampler_gpus=2), slots, tmp_path)
    wait(cluster._take_slots())
    assert [slot.gpus for slot in cluster._trainer_slots] == [("0",), ("1",)]
    assert [slot.gpus for slot in cluster._sampler_slots] == [("2", "3"), ("4", "5")]
    vllm = for_slot(config, cluster._sampler_slots[1].gpus).vllm
    assert (vllm.devices, vllm.args) == ("4,5", ("--enforce-eager", "--tensor-parallel-size", "2"))
    wait(cluster.close())


def test_gpu_of_its_own_needs_no_tensor_parallelism() -> None:
    config = EngineConfig(source="m", device="cuda", sampler="vllm", vllm=VLLM)
    assert for_slot(config, ("3",)).vllm == VLLM.model_copy(update={"devices": "3"})
    assert for_slot(config, ()) == config


def test_several_gpus_a_process_need_gpus(tmp_path: Path, wait: Any) -> None:
    config = EngineConfig(source="m", device="cpu", sampler="vllm")
    cluster = ModelCluster(config, ClusterConfig(samplers=1, sampler_gpus=2), LocalSlots(), tmp_path)
    with pytest.raises(ConfigError, match="sampler_gpus=2 needs GPUs"):
        wait(cluster.start())
