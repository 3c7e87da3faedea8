"""An uploaded loss at work: its graph rebuilt from the allowed names and run on the logprobs of one datum.

Before anything is computed for inputs of new shapes, every step is tried on tensors without storage: so sizes are
known, and refused, before memory is taken. A selection by a mask is planned as if it took all. Whole numbers that come
from such a selection's shape could make a later step larger than planned, so they are refused.

It runs on the CPU in float32, as a client would evaluate it: a bad index is then an error and not a broken GPU.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.custom_loss.graph import LossGraph, Node
from tinsmith.errors import BadRequest, TinsmithError, TooLarge

MAX_ELEMENTS = 2**25
"""Of all intermediate tensors of one datum: 128 MB in float32."""
MAX_PARTS = 2**16
"""Tensors that one step may give."""
MAX_SECONDS = 30.0
"""For the losses of one request."""

_CREATES = frozenset(("arange", "eye", "full", "linspace", "ones", "tril_indices", "triu_indices", "zeros"))
_SPLITS = frozenset(("chunk", "split", "unbind"))
_EXACT = frozenset(("ndim", "dim", "ndimension", "dtype", "device", "is_floating_point", "element_size"))
"""What is known of a selection whatever it selects."""
_MODULES: Mapping[str, Any] = {
    "operator": operator,
    "math": math,
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
}


@dataclass(frozen=True, slots=True)
class _DataDependent:
    """In a plan: a tensor whose true shape depends on values; it is at most this large."""

    tensor: Tensor


@dataclass(slots=True)
class CustomLoss:
    """One loss for the data of one request; keeps an eye on the time that they take together."""

    graph: LossGraph
    seconds: float = 0.0
    planned: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    def run(self, logprobs: Tensor, inputs: Mapping[str, np.ndarray]) -> tuple[float, Tensor, dict[str, float]]:
        """(loss, d loss / d logprobs, metrics) of one datum; the logprobs have their targets' shape.

        Raises BadRequest or TooLarge.
        """
        start = time.perf_counter()
        leaf = logprobs.detach().to("cpu", torch.float32).requires_grad_()
        arguments = [leaf]
        for name, rank in self.graph.inputs[1:]:
            values = torch.from_numpy(np.array(inputs[name]))
            arguments.append(values.reshape(()) if rank == 0 else values)
        shapes = tuple(tuple(one.shape) for one in arguments)
        if shapes not in self.planned:
            self._steps([torch.empty_like(one, device="meta") for one in arguments], "meta", start)
            self.planned.add(shapes)
        with torch.enable_grad():
            values = self._steps(arguments, "cpu", start)
            loss, metrics = self._returned(values)
            grad = self._gradient(loss, leaf)
        self.seconds += time.perf_counter() - start
        return float(loss.detach()), grad, metrics

    def _steps(self, arguments: Sequence[Tensor], device: str, start: float) -> dict[str, Any]:
        """Every node's value. On the device `meta` this is the plan: shapes alone."""
        values: dict[str, Any] = {}
        total = 0
        for number, node in enumerate(self.graph.nodes[:-1]):
            where = f"Loss {self.graph.name}, {node.public} (node {node.name!r})"
            if number < len(arguments):
                values[node.name] = arguments[number]
                continue
            try:
                value = _step(node, values, device)
            except TinsmithError as error:
                raise type(error)(f"{where}: {error.message}", error.hint) from error
            except Exception as error:  # whatever a step of a tenant's graph raises is the tenant's
                raise BadRequest(f"{where}: {(str(error) or repr(error)).splitlines()[0]}") from error
            values[node.name] = value
            total += sum(one.numel() for one in _tensors(value))
            if total > MAX_ELEMENTS:
                raise TooLarge(
                    f"{where}: the loss of one datum makes over {MAX_ELEMENTS} numbers.", "Shorten the data."
                )
            if self.seconds + time.perf_counter() - start > MAX_SECONDS:
                raise TooLarge(f"{where}: the request's losses took over {MAX_SECONDS:g} s.", "Send fewer data.")
        return values

    def _returned(self, values: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
        found = {key: values[name] for key, name in {"": self.graph.loss, **self.graph.metrics}.items()}
        for key, value in found.items():
            if not isinstance(value, Tensor) or value.ndim:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise BadRequest(
                    f"Loss {self.graph.name} returns {key or 'a loss'} of shape {shape}.", "Return scalars."
                )
        return found.pop(""), {key: float(value.detach()) for key, value in found.items()}

    def _gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        try:
            grad = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
        except RuntimeError as error:  # as of floor_divide, which torch cannot differentiate
            raise BadRequest(f"Loss {self.graph.name}: {str(error).splitlines()[0]}.", "Detach its input.") from error
        if grad is None:
            raise BadRequest(f"Loss {self.graph.name} has no gradient in logprobs.", "Do not detach all of them.")
        return grad


def _step(node: Node, values: Mapping[str, Any], device: str) -> Any:
    """What one node gives; in a plan, wrapped as data_dependent if values decide how large it is."""
    args: list[Any] = [_decoded(one, values, device) for one in node.args]
    kwargs: dict[str, Any] = {key: _decoded(one, values, device) for key, one in (node.kwargs or {}).items()}
    data_dependent = any(isinstance(one, _DataDependent) for one in _leaves((args, kwargs)))
    args, kwargs = _unwrap(args), _unwrap(kwargs)
    module, _, name = node.public.rpartition(".")
    if "device" in kwargs or (module == "torch" and name in _CREATES):
        kwargs["device"] = device
    _check_sizes(name, args)
    if node.target == "getattr":
        return _checked(getattr(args[0], args[1]), data_dependent and args[1] not in _EXACT)
    if module == "operator" and name == "getitem":
        return _item(args[0], args[1], data_dependent, planning=device == "meta")
    if name == "masked_select" and device == "meta":
        shape = torch.broadcast_shapes(*(one.shape for one in _tensors(args)))
        return _DataDependent(torch.empty(shape.numel(), device="meta"))
    return _checked(_call(node, module, name, args, kwargs, device), data_dependent and name not in _EXACT)


def _call(node: Node, module: str, name: str, args: list[Any], kwargs: dict[str, Any], device: str) -> Any:
    if module == "operator":
        _check_operands(name, args)
    if module == "math" and not all(isinstance(one, int | float) for one in args):
        raise BadRequest("math takes plain numbers.", "Use torch's function of that name.")
    if node.op != "call_method":
        return getattr(_MODULES[module], name)(*args, **kwargs)
    if name == "to":
        args = [device if isinstance(one, str) else one for one in args]
    return getattr(Tensor, name)(*args, **kwargs)


def _check_sizes(name: str, args: Sequence[Any]) -> None:
    if name in _SPLITS and max((max(one.shape, default=0) for one in _tensors(args)), default=0) > MAX_PARTS:
        raise TooLarge("it would give too many tensors.", f"At most {MAX_PARTS}.")
    if name == "matmul" and any(one.ndim > 2 for one in _tensors(args)):
        raise BadRequest("it takes at most two dimensions here.", "Use bmm.")


def _decoded(value: Any, values: Mapping[str, Any], device: str) -> Any:
    """An argument of the graph as torch takes it."""
    if isinstance(value, list):
        return [_decoded(one, values, device) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "ref":
        return values[inner]
    if kind in ("tuple", "slice"):
        parts = (_decoded(one, values, device) for one in inner)
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind == "dict":
        return {key: _decoded(one, values, device) for key, one in inner.items()}
    plain = {"ellipsis": ..., "device": device, "dtype": getattr(torch, inner) if kind == "dtype" else None}
    return float(inner) if kind == "float" else plain[kind]


def _item(container: Any, index: Any, data_dependent: bool, *, planning: bool) -> Any:
    """container[index], where a mask of a tensor stands by itself."""
    if not isinstance(container, Tensor):
        if not isinstance(container, tuple | list) or not isinstance(index, int | slice):
            raise BadRequest("it takes part of a tensor or a tuple.", "Index tuples by numbers.")
        return _checked(container[index], data_dependent)
    masks = [one for one in _tensors([index]) if one.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return _checked(container[index], data_dependent)
    if masks[0] is not index or index.dtype == torch.uint8:
        raise BadRequest("a mask stands by itself, and is of dtype bool.", "Index by one mask alone.")
    if not planning:
        return container[index]
    if index.shape != container.shape[: index.ndim]:
        raise BadRequest(f"a mask of shape {tuple(index.shape)} for {tuple(container.shape)}.", "Give both one shape.")
    return _DataDependent(container.reshape(index.numel(), *container.shape[index.ndim :]))


def _check_operands(name: str, args: Sequence[Any]) -> None:
    """Python's own operators would repeat texts and tuples, and raise whole numbers to any power."""
    if not all(isinstance(one, Tensor | int | float) for one in args):
        raise BadRequest("it takes tensors and numbers.", "Nothing else is computed with.")
    if name == "pow" and all(isinstance(one, int) for one in args):
        base, power = args
        if abs(base) > 1 and power * math.log2(abs(base)) >= 63:
            raise TooLarge("the result is beyond 64 bits.", "Use floats.")


def _checked(value: Any, data_dependent: bool) -> Any:
    """A step's value, if it is one that later steps may have."""
    if isinstance(value, Tensor):
        return _DataDependent(value) if data_dependent and value.ndim else value
    if isinstance(value, torch.dtype | torch.device | bool | float):
        return value
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise TooLarge("the result is beyond 64 bits.", "Use floats.")
        if data_dependent:
            raise BadRequest("it reads how many a mask selects.", "Sum the mask instead.")
        return value
    if isinstance(value, torch.Size | tuple | list):
        return _parts(value, data_dependent)
    raise BadRequest(f"it gives a {type(value).__name__}.", "Steps give tensors and numbers.")


def _parts(value: Sequence[Any], data_dependent: bool) -> Any:
    if len(value) > MAX_PARTS:
        raise TooLarge("it gives too many tensors.", f"At most {MAX_PARTS}.")
    found = tuple(_checked(one, data_dependent) for one in value)
    return found if isinstance(value, torch.Size) else _same_kind(value, found)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for one in value for leaf in _leaves(one)]
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(_unwrap(value)) if isinstance(leaf, Tensor)]


def _unwrap(value: Any) -> Any:
    """Without the wraps of a plan."""
    if isinstance(value, _DataDependent):
        return value.tensor
    if isinstance(value, tuple | list):
        return _same_kind(value, [_unwrap(one) for one in value])
    return {key: _unwrap(one) for key, one in value.items()} if isinstance(value, dict) else value


def _same_kind(value: Any, parts: Sequence[Any]) -> Any:
    """The parts as the same kind of sequence: one with `values` and `indices`, as of max and topk, keeps the names."""
    return type(value)(parts)
