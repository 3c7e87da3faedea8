"""A device for tests on machines without a GPU: torch sees an accelerator, and the CPU computes.

Code that works here places its tensors as a GPU needs it: an operator on tensors of the device and of the host raises,
as does `numpy()` of a tensor on the device. `counting` counts what costs time on a GPU whatever its speed: launches,
and the moments at which Python waits for the device. Not covered: memory, streams, compiled kernels, speed.

torch cannot be rid of a device again, and starts a thread for it in its next backward. So only processes of the fixture
`stand_in` install it, never the process of the tests.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

NAME = "standin"
SOURCES = str(Path("src", "tinsmith"))

_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
    "aten::repeat_interleave",
}  # fmt: skip
"""Operators whose result or its shape the host must know."""
_VIEWS = {
    "aten::_unsafe_view", "aten::alias", "aten::as_strided", "aten::detach", "aten::diagonal", "aten::empty",
    "aten::empty_like", "aten::empty_strided", "aten::expand", "aten::new_empty", "aten::new_empty_strided",
    "aten::permute", "aten::select", "aten::slice", "aten::split", "aten::split_with_sizes", "aten::squeeze", "aten::t",
    "aten::transpose", "aten::unbind", "aten::unfold", "aten::unsqueeze", "aten::view", "aten::resize_",
}  # fmt: skip
"""Operators without a kernel."""


@dataclass
class Counts:
    """What happened within `counting`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernels by operator."""
    reads: Counter[str] = field(default_factory=Counter)
    """Waits for a value, and copies to the host, by the line of the engine."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Copies to the device by the line of the engine."""
    bytes: Counter[str] = field(default_factory=Counter)
    """What kernels read and write, by operator."""


_open: list[Counts] = []


@contextmanager
def counting() -> Iterator[Counts]:
    """Count within the block."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


def is_available() -> bool:
    """Whether this torch takes devices that are written in Python."""
    return "_setup_privateuseone_for_python_backend" in vars(backend_registration)


@cache
def install() -> torch.device:
    """Make the device known to torch in this process; returns it."""
    import_module("torch._dynamo")  # lists torch's functions, before some are replaced below
    _device_constructors()
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operator, *args, **kwargs: _run(operator, args, kwargs), "PrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for name, overloads in (_FACTORIES | _WHOLE).items():
        for overload in overloads:
            operator = getattr(getattr(torch.ops.aten, name), overload)
            factories.impl(operator, partial(_made, operator), "PrivateUse1")
    _libraries.extend([library, factories])
    # These copy below Python, to where a fallback cannot follow.
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _through_the_host(getattr(torch, name)))
    return torch.device(NAME, 0)


def _made(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(operator, args, kwargs)


_FACTORIES = {"arange": ("default", "start", "start_step"), "linspace": ("default",), "eye": ("default", "m")}
"""Operators that below Python resize an empty tensor, which a fallback cannot see."""
_WHOLE = {"silu_backward": ("default",)}
"""Operators that are one kernel on a GPU, and that torch splits for devices which it does not know."""
_libraries: list[Any] = []
"""A library's registrations end with it."""


class DeviceTensor(Tensor):
    """A tensor on the device; `content` holds its numbers."""

    content: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content: Tensor) -> DeviceTensor:
        shape, strides, offset = content.size(), content.stride(), content.storage_offset()
        tensor = Tensor._make_wrapper_subclass(
            cls, shape, strides, offset, dtype=content.dtype, layout=content.layout, device=install()
        )
        tensor.content = content
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: DeviceTensor) -> None:
        torch._C.TensorBase.data.__set__(self, values)
        self.content = values.content

    def __repr__(self, **_: Any) -> str:
        return f"{NAME}({self.content!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())  # PyTorch's would copy the storage, which is empty

    def tolist(self) -> Any:
        _count("reads")
        return self.content.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"a tensor on {NAME} has no numpy array: copy it to the host first")

    __array__ = numpy

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_uploaded(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_uploaded(index), value)


def _uploaded(index: Any) -> Any:
    """An index with its lists and arrays as tensors of the device."""
    if isinstance(index, tuple):
        return tuple(_uploaded(part) for part in index)
    return torch.as_tensor(np.asarray(index), device=install()) if isinstance(index, list | np.ndarray) else index


def _through_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor or torch.as_tensor, with tensors of the device made on the host and copied."""

    @wraps(make)
    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, *args, device=device, **options)
        if isinstance(data, DeviceTensor):
            return data.to(**options) if options else data
        return make(data, *args, device="cpu", **options).to(install())

    return made


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on the host; its results are on the device that a GPU's would be on."""
    name = operator._schema.name
    theirs: list[DeviceTensor] = []
    ours: list[Tensor] = []

    def bare(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            theirs.append(tensor)
            return tensor.content
        ours.append(tensor)
        return tensor

    contents, options = _map(bare, args), {key: _map(bare, value) for key, value in kwargs.items()}
    indexes = name in _INDEXING and isinstance(args[0], DeviceTensor)
    if theirs and name not in _COPIES and not indexes and any(tensor.dim() for tensor in ours):
        shapes = [tuple(tensor.shape) for tensor in ours]
        raise RuntimeError(f"{name} has tensors on {NAME} and tensors of the host, {shapes}")
    on_device = isinstance(args[0], DeviceTensor) if name == "aten::copy_" else bool(theirs)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == NAME
        options["device"] = torch.device("cpu")
    if _open:
        _count_operator(name, args, theirs, ours, on_device=on_device)
    result = _ON_HOST.get(name, operator)(*contents, **options)
    if not on_device:
        return result
    if name not in _VIEWS:
        _count_bytes(name, [contents, options], result)
    changed = {id(tensor.content): tensor for tensor in theirs}  # what an operator changed in place
    return _map(lambda leaf: changed[id(leaf)] if id(leaf) in changed else DeviceTensor(leaf), result)


def launch(name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function as one kernel of the device, as Triton's are; it gets and returns the host's tensors."""

    def content(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DeviceTensor), f"{name} has a tensor of the host"
        return tensor.content

    inputs, options = _map(content, args), {key: _map(content, value) for key, value in kwargs.items()}
    result = kernel(*inputs, **options)
    _count("launches", name)
    _count_bytes(name, [inputs, options], result)
    return _map(DeviceTensor, result)


_ON_HOST: dict[str, Callable[..., Any]] = {
    "aten::histc": lambda values, *range_: torch.ops.aten.histc(values.float(), *range_),  # GPUs also count integers
    # Above the device, torch takes these for views with a mark, which the contents must not have.
    "aten::_conj": torch.ops.aten.conj_physical,
    "aten::_neg_view": torch.ops.aten.neg,
    "aten::mm": lambda left, right, dtype=None, *, out=None: (
        left.to(dtype) @ right.to(dtype) if dtype else torch.mm(left, right, out=out)
    ),
}
"""Operators that the host computes in another way than a GPU."""


def _map(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The arguments or results of an operator with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        changed = [_map(change, part) for part in value]
        return changed if isinstance(value, list) else tuple(changed)
    return value


def _count_operator(
    name: str, args: tuple[Any, ...], theirs: list[DeviceTensor], ours: list[Tensor], *, on_device: bool
) -> None:
    if name in _COPIES and theirs and not on_device:
        _count("reads")
    elif name in _COPIES and ours and on_device:
        _count("uploads")
    elif name in _INDEXING and on_device:
        indices = [index for index in args[1] if index is not None]
        for index in indices:
            if not isinstance(index, DeviceTensor):
                _count("uploads")
            if index.dtype in (torch.bool, torch.uint8):  # becomes indices, whose number the host must know
                _count("reads")
        _count("launches", name)
    elif name in _READS and theirs:
        _count("reads")
    elif on_device and name not in _VIEWS:
        _count("launches", name)


def _count_bytes(name: str, inputs: Any, result: Any) -> None:
    """Each input once, each output once."""
    for tensors in (inputs, result) if _open else ():
        distinct = {id(leaf): leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
        _count("bytes", name, sum(tensor.nbytes for tensor in distinct.values()))


def _count(kind: str, key: str | None = None, number: int = 1) -> None:
    for counts in _open:
        vars(counts)[kind][key or _line()] += number


def _line() -> str:
    """The innermost line of the engine that is running."""
    frame = sys._getframe()
    while frame is not None:
        if SOURCES in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.split(SOURCES)[1][1:]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the engine"
