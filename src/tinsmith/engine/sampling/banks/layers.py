"""All layers of a decoding step in one call, on CPUs: `cpu.decoding.LAYERS`.

Python takes a quarter of a millisecond to call the functions of a layer one by one: half of a step of few rows. In one
call the same functions compute the same bits. This is for dense models whose layers consist of compiled functions
alone; others are computed layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.instructions import kind_of, panel_kind
from tinsmith.engine.lora import layers
from tinsmith.engine.lora.adapter_groups import AdapterGroups
from tinsmith.engine.lora.compiled_adapters import CompiledAdapters
from tinsmith.engine.lora.compiled_projections import ProjectionCall, projections
from tinsmith.engine.lora.fused_layers import DecoderLayer
from tinsmith.engine.lora.linear import LoraLinear
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.decode import AttentionFunction, CompiledStep


@dataclass(frozen=True, slots=True)
class _Parts:
    """The modules of a layer."""

    norm: layers.RMSNorm
    attention: layers.Attention
    mlp_norm: layers.RMSNorm
    mlp: layers.MLP

    @classmethod
    def of(cls, layer: nn.Module) -> _Parts | None:
        """None unless compiled functions compute all of them."""
        own = [module for module in layer.modules() if isinstance(module, DecoderLayer)]  # trainers wrap it
        parts = dict(own[0].named_children()) if own else {}
        names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        norm, attention, mlp_norm, mlp = (parts.get(name) for name in names)
        if not isinstance(attention, layers.Attention) or not isinstance(mlp, layers.MLP):
            return None
        linear = (module for module in layer.modules() if isinstance(module, LoraLinear))
        norms = [module for module in layer.modules() if isinstance(module, layers.RMSNorm)]
        dtypes = {mlp.down_proj.frozen.dtype, *(each.weight.dtype for each in norms)}
        if attention.is_gated or not attention.rule.is_softmax or mlp.kernels is None:
            return None
        if len(dtypes) > 1 or not all(map(_is_laid_out, linear)):
            return None
        assert isinstance(norm, layers.RMSNorm)
        assert isinstance(mlp_norm, layers.RMSNorm)
        return cls(norm, attention, mlp_norm, mlp)


def _is_laid_out(module: LoraLinear) -> bool:
    return isinstance(module.frozen, FrozenLinear) and module.frozen.panels is not None and not module.target.slices


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Those of a step, [rows, columns], in the base's dtype unless noted; `cpu.decoding.LAYERS` has them by the same
    names. Each layer overwrites the last one's."""

    residual: Tensor
    """float32: what comes into the first layer."""
    total: Tensor
    """float32: what comes out of the last layer without its addition."""
    normed: Tensor
    scales: Tensor
    """float32."""
    query: Tensor
    rotated_query: Tensor
    key: Tensor
    rotated_key: Tensor
    value: Tensor
    attended: Tensor
    addition: Tensor
    """What attention and MLP add."""
    gate: Tensor
    up: Tensor
    gated: Tensor

    @classmethod
    def of(cls, parts: _Parts, rows: int) -> _Tensors:
        modules = parts.mlp.down_proj, parts.attention.q_proj, parts.attention.k_proj, parts.mlp.gate_proj
        width, heads, key_heads, mlp_width = (module.target.outputs for module in modules)
        like: Tensor = parts.norm.weight

        def tensor(columns: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return like.new_empty(rows, columns, dtype=dtype)

        return cls(
            residual=tensor(width, torch.float32),
            total=tensor(width, torch.float32),
            normed=tensor(width),
            scales=tensor(1, torch.float32),
            query=tensor(heads),
            rotated_query=tensor(heads),
            key=tensor(key_heads),
            rotated_key=tensor(key_heads),
            value=tensor(key_heads),
            attended=tensor(heads),
            addition=tensor(width),
            gate=tensor(mlp_width),
            up=tensor(mlp_width),
            gated=tensor(mlp_width),
        )


class _Step:
    """The tables of a step of so many rows under some adapters."""

    def __init__(
        self, every: Sequence[_Parts], rows: int, group: CompiledAdapters | None, function: AttentionFunction
    ) -> None:
        from tinsmith.engine.cpu import decoding

        self.tensors = own = _Tensors.of(every[0], rows)
        self._group, self._calls = group, list[Any]()  # which the table leads to
        head_width, kind = every[0].attention.width, kind_of(own.normed.dtype)
        heads, key_heads = (tensor.shape[1] // head_width for tensor in (own.query, own.key))
        attend = function(heads // key_heads).address
        self._attention = np.zeros(len(every), decoding.STEP)
        for number, rule in enumerate(parts.attention.rule for parts in every):
            self._attention[number]["layer"] = number
            self._attention[number]["window"], self._attention[number]["scale"] = rule.window or 0, rule.scale
        self._attention["queries"], self._attention["outputs"] = own.rotated_query.data_ptr(), own.attended.data_ptr()
        self._attention["new_keys"], self._attention["new_values"] = own.rotated_key.data_ptr(), own.value.data_ptr()
        first, size = self._attention.ctypes.data, decoding.STEP.itemsize
        table = [self._layer(parts, first + number * size, attend) for number, parts in enumerate(every)]
        self._layers = np.array(table, decoding.LAYER)
        self._function, self._step = decoding.layers_function(kind), np.zeros(1, decoding.LAYERS)
        step = self._step
        step["count"], step["table"], step["rows"] = len(every), self._layers.ctypes.data, rows
        step["width"], step["mlp_width"], step["head_width"] = own.normed.shape[1], own.gate.shape[1], head_width
        step["heads"], step["key_heads"] = heads, key_heads
        for field in fields(own):
            step[field.name] = getattr(own, field.name).data_ptr()
        step["project"] = projections().forward_function(kind).address
        step["parallel"] = openmp.address_of_parallel()

    def run(self, embedded: Tensor, cos: Tensor, sin: Tensor, attention: CompiledStep) -> Tensor:
        """Embeddings float32 [rows, D], and the tables of the rotation [rows, R] -> float32 [rows, D]."""
        own, step = self.tensors, self._step
        own.residual.copy_(embedded)
        for name in ("rows", "parts", "heads", "table", "line"):
            self._attention[name] = attention.step[name]
        step["cos"], step["sin"], step["rotary"] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        step["attention_threads"] = attention.threads
        openmp.run(self._function, step.ctypes.data, 1)
        return own.total + own.addition

    def _layer(self, parts: _Parts, step: int, attend: int) -> tuple[int | float, ...]:
        """`cpu.decoding.LAYER`."""
        own, attention, mlp = self.tensors, parts.attention, parts.mlp
        return (
            *_norm(parts.norm),
            *self._call(own.normed, [own.query, own.key, own.value], attention.q_proj, attention.k_proj,
                        attention.v_proj),
            *_norm(attention.q_norm),
            *_norm(attention.k_norm),
            step,
            attend,
            *self._call(own.attended, [own.addition], attention.o_proj),
            *_norm(parts.mlp_norm),
            *self._call(own.normed, [own.gate, own.up], mlp.gate_proj, mlp.up_proj),
            *self._call(own.gated, [own.addition], mlp.down_proj),
        )  # fmt: skip

    def _call(self, inputs: Tensor, outputs: Sequence[Tensor], *modules: Any) -> tuple[int, int]:
        """The address of `cpu.projections.CALL`, and its threads."""
        names, group = [module.name for module in modules], self._group
        tables = group.tables_of(names) if group is not None and group.has(names[0]) else None
        panels = [module.frozen.panels for module in modules]
        call, threads = ProjectionCall(inputs, outputs, panels, tables).prepared()
        self._calls.append(call)
        return addressof(call), threads


def _norm(norm: Any) -> tuple[int, float]:
    """The address of a norm's weight, and its eps."""
    return (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)


class CompiledLayers:
    """The layers of a dense model."""

    def __init__(self, base: BaseModel, every: Sequence[_Parts]) -> None:
        self.base, self._every = base, every
        self._step: _Step | None = None
        self._made_for: tuple[Any, ...] = ()

    @classmethod
    def of(cls, base: BaseModel) -> CompiledLayers | None:
        """None for a model of which PyTorch computes something."""
        if panel_kind(base.device, base.dtype) is None or not base.float32_residual:
            return None
        if base.vision is not None or base.recurrent is not None or base.uniform_kv is not None:
            return None
        stacks = [module for module in base.body.children() if isinstance(module, nn.ModuleList)]
        every = [parts for stack in stacks for layer in stack if (parts := _Parts.of(layer)) is not None]
        return cls(base, every) if every and sum(map(len, stacks)) == len(every) else None

    @staticmethod
    def serve(groups: AdapterGroups) -> bool:
        """Whether a step can be computed under these adapters."""
        return len(groups) < 2 and all(isinstance(group, CompiledAdapters) for group in groups)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: CompiledStep, groups: AdapterGroups) -> Tensor:
        """As `BaseModel.hidden`."""
        group = groups[0] if groups else None
        body: Any = self.base.body
        made_for = len(tokens), group, torch.get_num_threads()
        if self._step is None or self._made_for != made_for:
            assert group is None or isinstance(group, CompiledAdapters)
            self._step, self._made_for = _Step(self._every, len(tokens), group, attention.function), made_for
        embedded = self.base.model.get_input_embeddings()(tokens).float()
        cos, sin = (table[0, :, 0].contiguous() for table in body.rotary_emb(embedded[None], positions[None]))
        return body.norm(self._step.run(embedded, cos, sin, attention)[None])[0]

    def release_memory(self) -> None:
        """Drop what a later step would use again."""
        self._step, self._made_for = None, ()
