"""What the ranks of a trainer group do together: commands, outcomes and gradients over torch.distributed.

All ranks hold the same adapters and run the same commands in the same order. Rank 0 leads: it alone is called, sends
every command that changes a model to the others, and answers. Objects travel in a control group (gloo), whose ranks
may wait for days; gradients travel in a data group (NCCL on GPUs), where a peer that does not answer counts as lost.

A failed collective ends the process: its requests are acknowledged and must be replayed, not answered with the error.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.engine.base import PassResult
from tinsmith.engine.cluster.config import RankConfig
from tinsmith.engine.processes.machine import versions
from tinsmith.engine.training import shares
from tinsmith.engine.training.exchange import Job
from tinsmith.engine.training.optimizer import TrainableAdapter
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.errors import ConfigError, EngineError, PortTakenError, TinsmithError
from tinsmith.plurals import counted

log = logging.getLogger(__name__)

CONTROL_TIMEOUT = timedelta(days=365)
"""Ranks wait for the next command for as long as nobody sends one."""
LOST_PEER_STATUS = 70
"""Exit status of a rank whose connection to the others failed."""
CHECK_STEPS = 100
"""Steps of a model between two comparisons of its weights on all ranks."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def end_process(reason: str) -> NoReturn:
    """End this rank, and with it the group, which is then started again."""
    print(f"This rank ends: {reason}.", file=sys.stderr, flush=True)  # noqa: T201 - logging may hold locks
    os._exit(LOST_PEER_STATUS)


def _ending(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The call, which ends the process if it raises."""

    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return call(*args, **options)
        except BaseException:  # noqa: BLE001 - whatever it is, the ranks are no longer in step
            traceback.print_exc()
            end_process("an exchange with the other ranks failed")

    return checked


def _meet(config: RankConfig) -> Any:
    """The store that rank 0 serves, once all ranks have connected. Raises PortTakenError on rank 0."""
    url = urlsplit(config.rendezvous)
    assert url.hostname is not None
    assert url.port is not None
    world, serves = config.cluster.trainers, config.rank == 0
    try:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            url.hostname, url.port, world, serves, timeout=CONTROL_TIMEOUT, multi_tenant=True
        )
    except dist.DistError as error:
        if serves and "EADDRINUSE" in str(error):
            raise PortTakenError(f"Port {url.port} of {url.hostname} is in use.", "Start the group again.") from error
        traceback.print_exc()
        end_process("the other ranks cannot be reached")


class Collectives:
    """The calls of torch.distributed. Asynchronous ones run one after the other in a thread of their own, so that
    samples go on meanwhile."""

    def __init__(self, config: RankConfig, device: torch.device) -> None:
        """Meet the other ranks; blocks until all are there."""
        self.rank, self.world = config.rank, config.cluster.trainers
        self._thread = ThreadPoolExecutor(1, "collectives")
        if sys.platform == "linux" and "//127." in config.rendezvous:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else the address that the host's name resolves to
        store = _meet(config)
        _ending(dist.init_process_group)(
            "gloo", store=store, rank=self.rank, world_size=self.world, timeout=CONTROL_TIMEOUT
        )
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=config.cluster.data_timeout_s)
        self._data: Any = _ending(dist.new_group)(backend=backend, timeout=timeout)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks, as FSDP takes them."""
        return _ending(DeviceMesh.from_group)(self._data, device.type)

    async def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a method of this class, or a function that calls some, in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        values = [value]
        _ending(dist.broadcast_object_list)(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on rank 0; an empty list on the others."""
        values = [None] * self.world if self.rank == 0 else None
        _ending(dist.gather_object)(value, values, dst=0)
        return values or []

    def gather_everywhere(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values = [None] * self.world
        _ending(dist.all_gather_object)(values, value)
        return values

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        return min(self.gather_everywhere(value))

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each of some values over all ranks."""
        tensor = torch.tensor(values)
        _ending(dist.all_reduce)(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def sum(self, flat: Tensor) -> None:
        """Replace a tensor by its sum over all ranks, once all are here."""
        _ending(dist.barrier)()
        _ending(dist.all_reduce)(flat, group=self._data)

    def gather_tensors(self, flat: Tensor) -> list[Tensor]:
        """The tensors of all ranks, once all are here."""
        _ending(dist.barrier)()
        flats = [torch.empty_like(flat) for _ in range(self.world)]
        _ending(dist.all_gather)(flats, flat, group=self._data)
        return flats


class Ranks:
    """The exchange of a rank with the others. Implements `training.exchange.Exchange`."""

    def __init__(self, config: RankConfig, collectives: Collectives) -> None:
        self._collectives = collectives
        self._deterministic = config.engine.deterministic
        self._shards = config.cluster.shards_of_rows(deterministic=self._deterministic)
        self._per_rank = self._shards // collectives.world
        self.lockstep = config.cluster.shard

    @property
    def leads(self) -> bool:
        return self._collectives.rank == 0

    def least(self, value: int) -> int:
        return self._collectives.least(value)

    async def largest(self, values: Sequence[int]) -> list[int]:
        return await self._collectives.call(self._collectives.largest, values)

    @contextmanager
    def ending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # noqa: BLE001 - the others wait for this rank's part of a layer
            traceback.print_exc()
            end_process("a micro-batch of a sharded base model failed")

    def compare_machines(self, device: torch.device) -> None:
        """Raise ConfigError on all ranks unless they have the same software and kind of device."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        machines = self._collectives.gather_everywhere({**versions(), "device": name})
        for key in sorted({key for machine in machines for key in machine}):
            kinds = sorted({str(machine.get(key)) for machine in machines})
            if len(kinds) > 1:
                raise ConfigError(
                    f"The training processes have different kinds of {key}: {', '.join(kinds)}.",
                    "Their sums would not agree: use machines of one kind, with the same software.",
                )

    def shares(self, jobs: Mapping[str, RunRows]) -> Mapping[str, Sequence[RunRows]]:
        cut = self._shards_of_each if self._deterministic else self._share_of_all
        by_kind = {with_grad: cut({m: job.rows[with_grad] for m, job in jobs.items()}) for with_grad in (True, False)}
        return {
            model_id: [
                replace(job, rows={True: with_grad, False: without})
                for with_grad, without in zip(by_kind[True][model_id], by_kind[False][model_id], strict=True)
            ]
            for model_id, job in jobs.items()
        }

    async def settle(self, jobs: Sequence[Job]) -> list[list[PassResult] | Exception]:
        computed = []
        for job in jobs:
            error = job.error()
            computed.append((_portable(error), []) if error else (None, [run.scores() for run in job.runs]))
        gathered = await self._collectives.call(self._collectives.gather, computed)
        if len({len(of_rank) for of_rank in gathered}) > 1:
            end_process("the ranks have different passes")
        errors = [_first_error(of_job) for of_job in zip(*gathered, strict=True)]
        errors = await self._collectives.call(self._collectives.broadcast, errors)
        outcomes: list[list[PassResult] | Exception] = []
        for index, (job, error) in enumerate(zip(jobs, errors, strict=True)):
            if error is None and self.leads:
                job.runs[0].merge([scores for of_rank in gathered for scores in of_rank[index][1]])
            outcomes.append(error or job.runs[0].results())
        return outcomes

    async def read(self, read: Callable[[], _Result]) -> _Result:
        value: Any = None
        if self.leads:
            try:
                value = read()
            except Exception as error:  # noqa: BLE001 - every rank must raise it
                value = _Failure(_portable(error))
        value = await self._collectives.call(self._collectives.broadcast, value)
        if isinstance(value, _Failure):
            raise value.error
        return value

    @asynccontextmanager
    async def summed(self, model: TrainableAdapter) -> AsyncIterator[None]:
        if model.has_gradient:
            await self._collectives.call(self._sum, model)
        try:
            yield
        except BaseException:
            if not self.leads:  # a step that is refused leaves the gradient: all of it on one rank
                model.gradient.zero_()
            raise
        if model.steps % CHECK_STEPS == 0:
            await self._collectives.call(self._compare_weights, model)

    async def agree(self, error: Exception | None) -> None:
        """End the process unless a command had the same outcome on all ranks: an error of the same kind, or none."""
        kinds = await self._collectives.call(self._collectives.gather_everywhere, type(error).__name__)
        if len(set(kinds)) > 1:
            if error is not None:
                traceback.print_exception(error)
            end_process(f"a command had different outcomes on the ranks: {', '.join(kinds)}")

    def _share_of_all(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
        """This rank's share of the rows of all models together, so that few models are cut."""
        starts = dict(zip(rows, _starts(map(len, rows.values())), strict=True))
        tokens = [row.tokens for of_model in rows.values() for row in of_model]
        bounds = shares.balanced(shares.RowCosts.of(tokens, [*starts.values()]), self._collectives.world)
        start, stop = bounds[self._collectives.rank : self._collectives.rank + 2]
        return {
            model_id: [of_model[max(start - starts[model_id], 0) : max(stop - starts[model_id], 0)]]
            for model_id, of_model in rows.items()
        }

    def _shards_of_each(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
        """This rank's shards of the rows of each model, whatever other models there are."""
        cut: dict[str, list[Sequence[Any]]] = {}
        first = self._collectives.rank * self._per_rank
        for model_id, of_model in rows.items():
            bounds = shares.halved(shares.RowCosts.of([row.tokens for row in of_model]), self._shards)
            positions = [
                shard ^ shares.first_shard(model_id, self._shards) for shard in range(first, first + self._per_rank)
            ]
            cut[model_id] = [of_model[bounds[position] : bounds[position + 1]] for position in positions]
        return cut

    def _sum(self, model: TrainableAdapter) -> None:
        """Add up the gradients of all shards."""
        gradient = _tree_sum(model.take_shards(self._per_rank))
        if self._deterministic:
            gradient.copy_(_tree_sum(self._collectives.gather_tensors(gradient)))
        else:
            self._collectives.sum(gradient)

    def _compare_weights(self, model: TrainableAdapter) -> None:
        digest = hashlib.blake2b(model.master.detach().cpu().numpy().data, digest_size=16).hexdigest()
        if len(set(self._collectives.gather_everywhere(digest))) > 1:
            end_process(f"the ranks' weights differ after {counted(model.steps, 'step')} of a model")


class _Failure:
    """An error of the rank that leads, on its way to the others."""

    def __init__(self, error: TinsmithError) -> None:
        self.error = error


def _portable(error: Exception) -> TinsmithError:
    """The error in a form that can be sent."""
    return error if isinstance(error, TinsmithError) else EngineError(f"The pass failed: {error!r}")


def _first_error(of_job: Sequence[tuple[TinsmithError | None, Any]]) -> TinsmithError | None:
    return next((error for error, _ in of_job if error is not None), None)


def _starts(lengths: Any) -> list[int]:
    """Where each of some neighbouring parts starts."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]


def _tree_sum(parts: Sequence[Tensor | None]) -> Tensor:
    """The sum in the order of `shares.tree_order`, in the memory of the first part. None counts as zero."""
    sums = list(parts)
    for left, right in shares.tree_order(range(len(sums))):
        addend, total = sums[right], sums[left]
        if addend is not None:
            sums[left] = addend if total is None else total.add_(addend)
    assert sums[0] is not None
    return sums[0]
