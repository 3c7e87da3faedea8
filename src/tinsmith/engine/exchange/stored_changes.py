"""The changes that an adapter makes to a base model, in the names and layouts of the base's checkpoint files.

A checkpoint may store a parameter of a module under another name or in another layout: a matrix for each expert, where
transformers has one stack for all. transformers' own conversions between the two are reversed as when it saves a model.
They only rename, split, join and permute, so that the change of a weight is converted as the weight itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from tinsmith.engine.exchange.reading import StoredPair
from tinsmith.engine.lora.targets import ExpertTarget, LinearTarget, targets
from tinsmith.engine.model_parts import HEAD
from tinsmith.errors import Unsupported

FIRST_EXPERT = ".experts.0."
"""What the name of a matrix of the first expert holds in the checkpoints of every type."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stored tensor comes from."""

    key: str
    """Its name after the conversion, for the first expert if it is one of an expert's matrices."""
    parameters: tuple[str, ...]
    """The module parameters that it is made of."""
    expert: int | None = None
    """The expert whose matrix it is; None for any other tensor, also a stack of all experts."""
    is_converted: bool = True
    """Whether the file has it in another form than the module."""


class StoredChanges:
    """The changes of an adapter by the names of stored tensors, each computed when it is read."""

    def __init__(self, model: PreTrainedModel, pairs: Mapping[str, StoredPair], stored: Collection[str]) -> None:
        """`model` may be on the meta device, `pairs` are by site, `stored` the names in the base's files.

        Raises Unsupported if the files lack a weight that the adapter changes.
        """
        self._model, self._pairs = model, pairs
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)]  # type: ignore[assignment]
        self._linears: dict[str, LinearTarget] = {}
        self._stacks: dict[str, ExpertTarget] = {}
        for target in targets(model):
            if not any(site.name in pairs for site in target.sites):
                continue
            if isinstance(target, LinearTarget):
                self._linears[f"{target.name}.weight"] = target
            else:
                self._stacks |= dict.fromkeys(_stack_parameters(target), target)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.head = ""
        """Stored name of the output head, if the adapter changes it; it may be missing in the files."""
        self.embeddings = ""
        """Stored name of the token embeddings."""
        self._places = dict(self._find(_StoredNames(stored, model.base_model_prefix)))

    @property
    def names(self) -> Collection[str]:
        """Stored names of all weights that change."""
        return self._places.keys()

    def change(self, name: str) -> Tensor:
        """float32: what the adapter adds to a stored tensor."""
        place = self._places[name]
        own = {parameter: self._change_of(parameter, place.expert) for parameter in place.parameters}
        return self._converted(own)[place.key] if place.is_converted else own[place.key]

    def _find(self, stored: _StoredNames) -> Iterator[tuple[str, _Place]]:
        """(stored name, place) of each changed weight. Raises Unsupported for one that the files lack."""
        owners = self._owners()
        for parameter in self._linears:
            yield from self._find_dense(parameter, owners, stored)
        for parameter, target in self._stacks.items():
            yield from self._find_experts(parameter, target, stored)
        modules = {id(module): name for name, module in self._model.named_modules()}
        table = f"{modules[id(self._model.get_input_embeddings())]}.weight"
        self.embeddings = next(filter(None, map(stored.find, (*owners.by_parameter[table], table))), "")
        if HEAD in self._pairs:
            yield from self._find_head(owners, stored)

    def _find_dense(self, parameter: str, owners: _Owners, stored: _StoredNames) -> Iterator[tuple[str, _Place]]:
        names = {key: stored.find(key) for key in owners.by_parameter[parameter]}
        if all(names.values()):
            for key, name in names.items():
                yield name, _Place(key, tuple(owners.by_key[key]))
        else:
            yield stored.require(parameter), _Place(parameter, (parameter,), is_converted=False)

    def _find_experts(self, parameter: str, target: ExpertTarget, stored: _StoredNames) -> Iterator[tuple[str, _Place]]:
        """As stacks or one by one after the conversion, else as the module's own stack."""
        places = dict[str, _Place]()
        for key, tensor in self._converted(
            {parameter: torch.empty(1, *self._shapes[parameter][1:], device="meta")}
        ).items():
            if tensor.ndim == 3:
                places[stored.find(key)] = _Place(key, (parameter,))
                continue
            for expert in range(target.experts):
                name = key.replace(FIRST_EXPERT, FIRST_EXPERT.replace("0", str(expert)))
                places[stored.find(name)] = _Place(key, (parameter,), expert)
        if "" in places:
            places = {stored.require(parameter): _Place(parameter, (parameter,), is_converted=False)}
        yield from places.items()

    def _find_head(self, owners: _Owners, stored: _StoredNames) -> Iterator[tuple[str, _Place]]:
        """The head's own weight; where it is tied to the embeddings, the name of the one that it gets."""
        parameter = f"{HEAD}.weight"
        (key,) = owners.by_parameter[parameter]
        self.head = stored.find(key) or stored.find(parameter) or (key if self.embeddings else stored.require(key))
        yield self.head, _Place(parameter, (parameter,), is_converted=False)

    def _owners(self) -> _Owners:
        """The parameters that each stored tensor outside of stacks of experts is made of, and the reverse."""
        owners = _Owners(defaultdict(list), {})
        for name, shape in self._shapes.items():
            if name not in self._stacks:
                owners.by_parameter[name] = list(self._converted({name: torch.empty(shape, device="meta")}))
                for key in owners.by_parameter[name]:
                    owners.by_key[key].append(name)
        return owners

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of parameters as a checkpoint stores them."""
        return revert_weight_conversion(self._model, tensors)

    def _change_of(self, parameter: str, expert: int | None) -> Tensor:
        """The change of a parameter, or of one expert [1, ...] of a stack; zeros if the adapter does not reach it."""
        if parameter in self._stacks:
            return self._change_of_stack(parameter, self._stacks[parameter], expert)
        if parameter == f"{HEAD}.weight" and HEAD in self._pairs:
            return self._product(HEAD)
        change = torch.zeros(self._shapes[parameter])
        if parameter in self._linears:
            target = self._linears[parameter]
            is_transposed = isinstance(self._model.get_submodule(target.name), Conv1D)
            columns = change if is_transposed else change.T  # [in, out]
            for rows in target.slices:
                if rows.name in self._pairs:
                    view = rows.view(columns)
                    view += self._product(rows.name).T.reshape(view.shape)
            if not target.slices:
                columns += self._product(target.name).T
        return change

    def _change_of_stack(self, parameter: str, target: ExpertTarget, expert: int | None) -> Tensor:
        module: Any = self._model.get_submodule(target.name)
        if parameter.endswith(".down_proj"):
            change = self._expert_product(target, "w2", expert)
        elif not target.has_gate:
            change = self._expert_product(target, "w1", expert)
        else:
            gate, up = (self._expert_product(target, leaf, expert) for leaf in ("w1", "w3"))
            is_concatenated = bool(module.is_concatenated)
            change = torch.cat([gate, up], 1) if is_concatenated else torch.stack([gate, up], 2).flatten(1, 2)
        return change.mT if module.is_transposed else change

    def _expert_product(self, target: ExpertTarget, leaf: str, expert: int | None) -> Tensor:
        """[E, out, in], or [1, out, in] of one expert."""
        name, count = f"{target.name}.{leaf}", target.experts if expert is None else 1
        if name not in self._pairs:
            sizes = (target.hidden, target.intermediate)
            return torch.zeros(count, *(sizes if leaf == "w2" else sizes[::-1]))
        pair = self._pairs[name]
        a, b = (
            matrix if expert is None or len(matrix) == 1 else matrix[expert : expert + 1] for matrix in (pair.a, pair.b)
        )
        return (pair.scale * b @ a).expand(count, -1, -1)

    def _product(self, site: str) -> Tensor:
        pair = self._pairs[site]
        return pair.scale * (pair.b @ pair.a)


@dataclass(frozen=True, slots=True)
class _Owners:
    """How stored tensors and module parameters belong together."""

    by_key: dict[str, list[str]]
    by_parameter: dict[str, list[str]]


def _stack_parameters(target: ExpertTarget) -> tuple[str, str]:
    return f"{target.name}.{'gate_up_proj' if target.has_gate else 'up_proj'}", f"{target.name}.down_proj"


class _StoredNames:
    """The names in the files, where a wrapper of other modalities may add a prefix, or the model's own be missing."""

    def __init__(self, names: Collection[str], prefix: str) -> None:
        self._names, self._prefix = frozenset(names), f"{prefix}."
        self._by_end: dict[str, list[str]] = defaultdict(list)
        for name in names:
            pieces = name.split(".")
            for start in range(len(pieces)):
                self._by_end[".".join(pieces[start:])].append(name)

    def find(self, name: str) -> str:
        """The stored name of a weight; "" if it is missing."""
        matches = [name] if name in self._names else self._by_end.get(name.removeprefix(self._prefix), [])
        return matches[0] if len(matches) == 1 else ""

    def require(self, name: str) -> str:
        """The stored name of a weight. Raises Unsupported if it is missing."""
        if stored := self.find(name):
            return stored
        raise Unsupported(
            f"The adapter changes {name}, which the base's files do not hold.",
            "Give the base model that it was trained on: --base.",
        )
