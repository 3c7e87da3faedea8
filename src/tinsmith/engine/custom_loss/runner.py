"""Runs an uploaded loss: its graph is rebuilt from the allowed names and evaluated on the logprobs of one datum.

Before anything is computed for inputs of new shapes, every node is evaluated on meta tensors, which have no storage, so
that sizes are known and refused before memory is allocated. A selection by a mask is planned as if it selected
everything. Integers read from the shape of such a selection could make a later node larger than planned, so they are
refused.

Losses run on the CPU in float32, as a client would evaluate them: a bad index is then an error and not a GPU fault.
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

from tinsmith.engine.custom_loss.graph import MAX_SECONDS, LossGraph, Node
from tinsmith.errors import BadRequest, TinsmithError, TooLarge

MAX_ELEMENTS = 2**25
"""Elements of all intermediate tensors of one datum: 128 MB in float32."""
MAX_PLANS = 1024
"""Shapes of inputs that are remembered as planned."""
MAX_TENSORS = 2**16
"""Tensors that one node may return."""

_CREATES = frozenset(("arange", "eye", "full", "linspace", "ones", "tril_indices", "triu_indices", "zeros"))
_SPLITS = frozenset(("chunk", "split", "unbind"))
_EXACT = frozenset(("ndim", "dim", "ndimension", "dtype", "device", "is_floating_point", "element_size"))
"""Properties that do not depend on a tensor's shape."""
_MODULES: Mapping[str, Any] = {
    "operator": operator,
    "math": math,
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
}


@dataclass(frozen=True, slots=True)
class _DataDependent:
    """A meta tensor whose actual shape depends on values; this is its largest shape."""

    tensor: Tensor


@dataclass(slots=True)
class CustomLoss:
    """An uploaded loss, with the time that the data of one request have taken together."""

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
        shapes = tuple(tuple(argument.shape) for argument in arguments)
        if shapes not in self.planned:
            self._evaluate([torch.empty_like(argument, device="meta") for argument in arguments], "meta", start)
            if len(self.planned) >= MAX_PLANS:
                self.planned.clear()
            self.planned.add(shapes)
        with torch.enable_grad():
            values = self._evaluate(arguments, "cpu", start)
            loss, metrics = self._returned(values)
            grad = self._gradient(loss, leaf)
        self.seconds += time.perf_counter() - start
        return float(loss.detach()), grad, metrics

    def _evaluate(self, arguments: Sequence[Tensor], device: str, start: float) -> dict[str, Any]:
        """Every node's value. On the device `meta` this is the plan, with shapes only."""
        values: dict[str, Any] = {}
        total = 0
        for number, node in enumerate(self.graph.nodes[:-1]):
            where = f"Loss {self.graph.name}, {node.public} (node {node.name!r})"
            if number < len(arguments):
                values[node.name] = arguments[number]
                continue
            try:
                value = _evaluate_node(node, values, device)
            except TinsmithError as error:
                raise type(error)(f"{where}: {error.message}", error.hint) from error
            except Exception as error:  # any error of a tenant's graph is the tenant's fault
                raise BadRequest(f"{where}: {(str(error) or repr(error)).splitlines()[0]}") from error
            values[node.name] = value
            total += sum(tensor.numel() for tensor in _tensors(value))
            if total > MAX_ELEMENTS:
                raise TooLarge(
                    f"{where}: the loss of one datum needs over {MAX_ELEMENTS} elements.", "Shorten the data."
                )
            if self.seconds + time.perf_counter() - start > MAX_SECONDS:
                raise TooLarge(f"{where}: the losses of the request took over {MAX_SECONDS:g} s.", "Send fewer data.")
        return values

    def _returned(self, values: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
        outputs = {key: values[name] for key, name in {"": self.graph.loss, **self.graph.metrics}.items()}
        for key, value in outputs.items():
            if not isinstance(value, Tensor) or value.ndim:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise BadRequest(
                    f"Loss {self.graph.name} returns {key or 'a loss'} of shape {shape}.", "Return scalars."
                )
        return outputs.pop(""), {key: float(value.detach()) for key, value in outputs.items()}

    def _gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        try:
            grad = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
        except RuntimeError as error:  # for example floor_divide, which torch cannot differentiate
            raise BadRequest(f"Loss {self.graph.name}: {str(error).splitlines()[0]}.", "Detach its input.") from error
        if grad is None:
            raise BadRequest(f"Loss {self.graph.name} has no gradient in logprobs.", "Do not detach logprobs.")
        return grad


def _evaluate_node(node: Node, values: Mapping[str, Any], device: str) -> Any:
    """The value of a node; in a plan, a _DataDependent if its shape depends on values."""
    args: list[Any] = [_decode(argument, values, device) for argument in node.args]
    kwargs: dict[str, Any] = {key: _decode(argument, values, device) for key, argument in (node.kwargs or {}).items()}
    data_dependent = any(isinstance(leaf, _DataDependent) for leaf in _leaves((args, kwargs)))
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
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in _tensors(args)))
        return _DataDependent(torch.empty(shape.numel(), device="meta"))
    return _checked(_call(node, module, name, args, kwargs, device), data_dependent and name not in _EXACT)


def _call(node: Node, module: str, name: str, args: list[Any], kwargs: dict[str, Any], device: str) -> Any:
    if module == "operator":
        _check_operands(name, args)
    if module == "math" and not all(isinstance(argument, int | float) for argument in args):
        raise BadRequest("math takes plain numbers.", "Use torch's function of the same name.")
    if node.op != "call_method":
        return getattr(_MODULES[module], name)(*args, **kwargs)
    if name == "to":
        args = [device if isinstance(argument, str) else argument for argument in args]
    return getattr(Tensor, name)(*args, **kwargs)


def _check_sizes(name: str, args: Sequence[Any]) -> None:
    if name in _SPLITS and max((max(tensor.shape, default=0) for tensor in _tensors(args)), default=0) > MAX_TENSORS:
        raise TooLarge("it would return too many tensors.", f"At most {MAX_TENSORS}.")
    if name == "matmul" and any(tensor.ndim > 2 for tensor in _tensors(args)):
        raise BadRequest("it supports at most two dimensions.", "Use bmm.")


def _decode(value: Any, values: Mapping[str, Any], device: str) -> Any:
    """Convert an argument of the graph to what torch takes."""
    if isinstance(value, list):
        return [_decode(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "ref":
        return values[inner]
    if kind in ("tuple", "slice"):
        items = (_decode(item, values, device) for item in inner)
        return tuple(items) if kind == "tuple" else slice(*items)
    if kind == "dict":
        return {key: _decode(item, values, device) for key, item in inner.items()}
    plain = {"ellipsis": ..., "device": device, "dtype": getattr(torch, inner) if kind == "dtype" else None}
    return float(inner) if kind == "float" else plain[kind]


def _item(container: Any, index: Any, data_dependent: bool, *, planning: bool) -> Any:
    """container[index]; a mask must be the only index of a tensor."""
    if not isinstance(container, Tensor):
        if not isinstance(container, tuple | list) or not isinstance(index, int | slice):
            raise BadRequest("it indexes something else than a tensor or a tuple.", "Index tuples by integers.")
        return _checked(container[index], data_dependent)
    masks = [tensor for tensor in _tensors([index]) if tensor.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return _checked(container[index], data_dependent)
    if masks[0] is not index or index.dtype == torch.uint8:
        raise BadRequest("a mask must be the only index and have dtype bool.", "Index by one mask.")
    if not planning:
        return container[index]
    if index.shape != container.shape[: index.ndim]:
        raise BadRequest(
            f"a mask of shape {tuple(index.shape)} indexes shape {tuple(container.shape)}.", "Give both the same shape."
        )
    return _DataDependent(container.reshape(index.numel(), *container.shape[index.ndim :]))


def _check_operands(name: str, args: Sequence[Any]) -> None:
    """Refuse operands with which Python's operators would repeat texts and tuples, or compute huge integers."""
    if not all(isinstance(argument, Tensor | int | float) for argument in args):
        raise BadRequest("it takes tensors and numbers.", "Use no other operands.")
    if name == "pow" and all(isinstance(argument, int) for argument in args):
        base, power = args
        if abs(base) > 1 and power * math.log2(abs(base)) >= 63:
            raise TooLarge("the result is beyond 64 bits.", "Use floats.")


def _checked(value: Any, data_dependent: bool) -> Any:
    """A node's value, if it is of a type that later nodes may read."""
    if isinstance(value, Tensor):
        return _DataDependent(value) if data_dependent and value.ndim else value
    if isinstance(value, torch.dtype | torch.device | bool | float):
        return value
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise TooLarge("the result is beyond 64 bits.", "Use floats.")
        if data_dependent:
            raise BadRequest("it reads how many elements a mask selects.", "Sum the mask instead.")
        return value
    if isinstance(value, torch.Size | tuple | list):
        return _checked_items(value, data_dependent)
    raise BadRequest(f"it returns a {type(value).__name__}.", "Operations must return tensors and numbers.")


def _checked_items(value: Sequence[Any], data_dependent: bool) -> Any:
    if len(value) > MAX_TENSORS:
        raise TooLarge("it returns too many tensors.", f"At most {MAX_TENSORS}.")
    items = tuple(_checked(item, data_dependent) for item in value)
    return items if isinstance(value, torch.Size) else _same_kind(value, items)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(_unwrap(value)) if isinstance(leaf, Tensor)]


def _unwrap(value: Any) -> Any:
    """Replace each _DataDependent by its tensor."""
    if isinstance(value, _DataDependent):
        return value.tensor
    if isinstance(value, tuple | list):
        return _same_kind(value, [_unwrap(item) for item in value])
    return {key: _unwrap(item) for key, item in value.items()} if isinstance(value, dict) else value


def _same_kind(value: Any, items: Sequence[Any]) -> Any:
    """The items as a sequence of the same type; named results, as of max and topk, keep their names."""
    return type(value)(items)
