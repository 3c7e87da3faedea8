"""A base model whose layers are sharded over the ranks of a group, with FSDP2.

Each rank holds its slices of the projections, which it alone reads from the files; before a layer computes, forward or
backward, the ranks gather it. Embeddings, norms and output head are whole on every rank. Adapters are in no module, so
nothing of them is sharded, and the frozen base has no gradient to reduce.

Whether this engine computes the architecture is checked on its first two layers. Dense models on the fast path whose
layers are alike are supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import fused_layers, layers, linear
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model import attention, flex_attention, loading
from tinsmith.engine.model.architectures import longrope
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.logit_rule import logit_rule
from tinsmith.engine.model.sources import load_errors, locate
from tinsmith.engine.torch_engine import PreparedBase
from tinsmith.engine.training import activation_checkpointing
from tinsmith.errors import Unsupported

PROBE_LAYERS = 2
"""Layers that are computed whole on every rank to check the architecture."""
_HINT = "Serve it without shard, on devices that hold it whole."
_INDEX = "model.safetensors.index.json"


class ShardedLinear:
    """x W^T + b whose W [out, in] and b are parameters of a module, which FSDP gathers before the layer computes.

    They are read at each product: between two, the module's parameters are slices.
    """

    reordered = False

    def __init__(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        self._module = module
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        module.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.products = 0
        """Number of products so far, which shows that a slow pass does not hang."""

    def reorder(self, *, backward: bool = True) -> ShardedLinear:
        """Leave the matrix as it is: a copy would be a whole one."""
        del backward
        return self

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows W^T + b [R, out], in new memory."""
        self.products += 1
        module: Any = self._module
        return nn.functional.linear(rows, module.weight, module.bias)

    def backward(self, grads: Tensor, onto: Tensor | None = None) -> Tensor:
        """grads [R, out] -> grads W [R, in], added to `onto` if given, whose memory may be reused."""
        self.products += 1
        module: Any = self._module
        return grads @ module.weight if onto is None else onto.addmm_(grads, module.weight)


def prepare(config: EngineConfig, mesh: DeviceMesh) -> PreparedBase:
    """Load this rank's slices of a base model; all ranks of the mesh do so together.

    Raises ConfigError if the model cannot be loaded, Unsupported if it cannot be sharded.
    """
    located = locate(config.source)
    with load_errors(config.source):
        settings: Any = AutoConfig.from_pretrained(located.folder)
        tokenizer = AutoTokenizer.from_pretrained(located.folder)
    _refuse(config, settings)
    device = loading.device_of(config.device)
    dtype = loading.dtype_of(config.dtype, device, settings)
    probe = _probe(config, settings, Path(located.folder), tokenizer, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="eager")
    model.eval().requires_grad_(False)
    model.set_attn_implementation(attention.register())
    with Weights(Path(located.folder)) as weights:
        _load_whole(model, weights, device)
        longrope.install(config.source, model, probe.card.original_context)
        flex = flex_attention.is_supported(device)
        base = BaseModel(card=probe.card, model=model, body=model.base_model, tokenizer=tokenizer, flex_attention=flex)
        active = linear.adapt(base)
        for module in _linears(model):
            frozen: Any = module.frozen
            module.frozen = ShardedLinear(module, *frozen.tensors())  # type: ignore[assignment]
        base = layers.replace_layers_as(base, probe)
        fused_layers.use_kernels(base, probe)
        switch = activation_checkpointing.install(base)
        for layer in base.body.get_submodule("layers").children():
            norms = {parameter for parameter in layer.parameters() if not parameter.is_meta}
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=norms)
            _load_slices(layer, weights, mesh, device)
        # A root without parameters: each layer's gathering begins while the one before computes.
        fully_shard(base.body, mesh=mesh, ignored_params=set(base.body.parameters(recurse=True)) - _sharded(base.body))
    weight_bytes = sum(parameter.to_local().nbytes for parameter in _sharded(base.body))  # type: ignore[attr-defined]
    weight_bytes += sum(parameter.nbytes for parameter in model.parameters() if not isinstance(parameter, DTensor))
    card = replace(probe.card, weight_bytes=weight_bytes, device=str(device))
    return PreparedBase(
        replace(base, card=card), active, LMHead(base.head, logit_rule(model), checks=base.checks), switch
    )


class Weights:
    """The tensors of a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / _INDEX
        self._files: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files or (not self._files and name in self._file("model.safetensors").keys())  # noqa: SIM118

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor; no others are read."""
        return self._file(self._files.get(name, "model.safetensors")).get_slice(name)[start:stop]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, "pt"))
        return self._open[name]


def _refuse(config: EngineConfig, settings: Any) -> None:
    """Raises Unsupported, by name, for what cannot be sharded."""
    values = settings.to_dict()
    kinds = set(values.get("layer_types") or ())
    reasons = {
        "quantize": config.quantize != "none",
        "path: general": config.path == "general",
        f"layers of different kinds ({', '.join(sorted(kinds))})": len(kinds) > 1,
        "a mixture of experts": any(
            values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")
        ),
        "images": "vision_config" in values,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(
                f"{config.source}: shard does not work with {reason}.",
                _HINT,
            )


def _probe(config: EngineConfig, settings: Any, folder: Path, tokenizer: Any, dtype: torch.dtype) -> BaseModel:
    """The first layers of the model on this CPU, checked, with the layers that this engine computes.

    Raises Unsupported if it does not compute them.
    """
    values = {**settings.to_dict(), "num_hidden_layers": PROBE_LAYERS}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:PROBE_LAYERS]
    first = type(settings).from_dict(values)
    with load_errors(config.source):
        model = AutoModelForCausalLM.from_pretrained(folder, config=first, dtype=dtype, attn_implementation="eager")
    base = loading.prepare(loading.LoadedModel(model, tokenizer, config.source, str(folder)))
    linear.adapt(base)
    replaced = layers.replace_layers(base)
    if not replaced.float32_residual:
        raise Unsupported(f"{config.source} ({base.card.arch}): shard needs the layers of the fast path.", _HINT)
    return replaced


def _load_whole(model: PreTrainedModel, weights: Weights, device: torch.device) -> None:
    """Give every rank the embeddings, norms and head, and compute what is in no file."""
    linears = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    heads = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
    tied: Any = model.get_output_embeddings()
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        if f"{owner}." in linears and owner not in heads:
            continue
        if name in weights:
            value = weights.rows(name, 0, len(parameter)).to(device, parameter.dtype)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    if tied.weight.is_meta:
        tied.weight = model.get_input_embeddings().weight
    body: Any = model.base_model
    body.rotary_emb = type(body.rotary_emb)(config=model.config).to(device)


def _load_slices(layer: nn.Module, weights: Weights, mesh: DeviceMesh, device: torch.device) -> None:
    """Read this rank's rows of a layer's matrices."""
    for module in _linears(layer):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            local = parameter.to_local()  # type: ignore[attr-defined]
            start = mesh.get_local_rank() * -(-len(parameter) // mesh.size())
            rows = weights.rows(f"{module.name}.{leaf}", start, start + len(local)).to(device, parameter.dtype)
            value = DTensor.from_local(
                rows, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            module.load_state_dict({leaf: value}, assign=True, strict=False)


def _linears(module: nn.Module) -> Iterator[linear.LoraLinear]:
    return (child for child in module.modules() if isinstance(child, linear.LoraLinear))


def _sharded(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if isinstance(parameter, DTensor)}
