"""The oracle: plain transformers with PEFT, right-padded rows, every loss written out, and torch's AdamW.

Deliberately slow and simple, without code of the engine. Computes in float64 by default, so that rounding does not blur
comparisons; norms and rotary angles stay float32 inside transformers, as they do in the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)


def target_modules(lora: LoraSpec) -> list[str]:
    """Names of the modules that the flags of a spec adapt."""
    chosen: tuple[str, ...] = ()
    chosen += ATTENTION if lora.train_attn else ()
    chosen += MLP if lora.train_mlp else ()
    chosen += UNEMBED if lora.train_unembed else ()
    return list(chosen)


def plain_model(base: Path, dtype: torch.dtype = torch.float64, **options: Any) -> torch.nn.Module:
    """The base model as transformers loads it; `options` are those of `from_pretrained`."""
    if options:
        return _loaded(base, dtype, **options)
    return deepcopy(
        _loaded_once(base, dtype, *(file.stat().st_mtime_ns for file in sorted(base.glob("*.safetensors"))))
    )


def _loaded(base: Path, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager", **options).eval()


@lru_cache(maxsize=8)
def _loaded_once(base: Path, dtype: torch.dtype, *_times: int) -> torch.nn.Module:
    """A copy of it takes a quarter of the time that loading takes."""
    return _loaded(base, dtype)


def write_adapter(base: Path, folder: Path, lora: LoraSpec, *, size: float = 0.05) -> Path:
    """Write an adapter folder with PEFT, float32, with A and B random from the spec's seed."""
    config = LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=target_modules(lora))
    with tied_embeddings_are_meant():
        model = get_peft_model(plain_model(base, torch.float32), config)
    draw = torch.Generator().manual_seed(lora.seed)
    with torch.no_grad():
        for parameter in _trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * size)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


class Reference:
    """One adapter on one base model, trained directly by the definitions."""

    def __init__(self, base: Path, adapter: Path, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        with tied_embeddings_are_meant():
            self.model = PeftModel.from_pretrained(plain_model(base, dtype, **options), adapter, is_trainable=True)
        self.parameters = _trainable(self.model)
        self.optimizer: torch.optim.AdamW | None = None
        self._loaded = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def reset(self) -> None:
        """Be again as it was loaded."""
        self.optimizer = None
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self._loaded[name])
            parameter.grad = None

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[N, V] of one sequence."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([list(tokens)])).logits[0].numpy()

    def logprobs(self, data: Sequence[Datum]) -> list[Tensor]:
        """Logprobs of each datum's targets, in their shape, with gradients."""
        return [_pick(whole, datum) for whole, datum in zip(self.softmaxes(data), data, strict=True)]

    def softmaxes(self, data: Sequence[Datum]) -> list[Tensor]:
        """The log-softmax [N, V] of each datum, with gradients."""
        longest = max(len(datum.tokens) for datum in data)
        ids = torch.zeros(len(data), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, datum in enumerate(data):
            ids[row, : len(datum.tokens)] = torch.from_numpy(np.asarray(datum.tokens, dtype=np.int64))
            mask[row, : len(datum.tokens)] = 1
        all_logprobs = self.model(input_ids=ids, attention_mask=mask).logits.log_softmax(dim=-1)
        return [all_logprobs[row, : len(datum.tokens)] for row, datum in enumerate(data)]

    def loss(self, request: Pass) -> tuple[Tensor, list[Tensor]]:
        """The request's loss, summed over all data, and its logprobs."""
        wholes = self.softmaxes(request.data)
        logprobs = [_pick(whole, datum) for whole, datum in zip(wholes, request.data, strict=True)]
        losses = [objective(p, datum, request) for p, datum in zip(logprobs, request.data, strict=True)]
        more = [terms(p, whole, d, request) for p, whole, d in zip(logprobs, wholes, request.data, strict=True)]
        return torch.stack(losses).sum() + torch.stack(more).sum(), logprobs

    def entropies(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """Entropy of the softmax at each position."""
        with torch.no_grad():
            return [-(whole.exp() * whole).sum(-1).numpy() for whole in self.softmaxes(data)]

    def backward(self, *requests: Pass) -> list[float]:
        """Accumulate the gradients of these requests; returns their losses."""
        losses = []
        for request in requests:
            loss, _ = self.loss(request)
            loss.backward()
            losses.append(float(loss.detach()))
        return losses

    def gradients(self) -> dict[str, np.ndarray]:
        """By the names of PEFT's adapter file; zeros where there is no gradient."""
        return {name: _array(p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in self._named()}

    def weights(self) -> dict[str, np.ndarray]:
        """By the names of PEFT's adapter file."""
        return {name: _array(parameter.detach()) for name, parameter in self._named()}

    def step(self, adam: AdamParams) -> float:
        """Take a torch AdamW step; moments persist between calls. Returns the gradient's norm before clipping."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.parameters.values())
        for group in self.optimizer.param_groups:
            group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
            group.update(weight_decay=adam.weight_decay)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        limit = adam.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name.replace(".default", ""), parameter) for name, parameter in self.parameters.items()]


def assert_same(actual: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float = 1e-4) -> None:
    """Assert that each tensor is within `tolerance` of the wanted one, relative to its norm.

    A tensor that is nearly zero is compared with a hundredth of the largest norm, because cancellation leaves rounding.
    """
    assert sorted(actual) == sorted(wanted)
    least = 0.01 * max(float(np.linalg.norm(target)) for target in wanted.values())
    for name, target in wanted.items():
        assert actual[name].shape == target.shape, name
        distance, size = np.linalg.norm(actual[name] - target), np.linalg.norm(target)
        assert distance <= tolerance * max(size, least), f"{name}: off by {distance:.3g} of {size:.3g}"


def objective(p: Tensor, datum: Datum, request: Pass) -> Tensor:
    """The loss of one datum whose targets have logprobs `p`."""
    inputs = {name: torch.from_numpy(np.asarray(values)).to(p.dtype) for name, values in datum.inputs.items()}
    if request.loss_fn == "cross_entropy":
        weights = inputs.get("weights", torch.ones_like(p))
        return -(weights * p).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    if request.loss_fn == "trinity_ppo":
        return _trinity(p, inputs, request.loss_config)
    low, high = _clips(p, inputs, request)
    total = 0.0 * p.sum()
    shift = _sequence_shift(p, q, inputs.get("sequence_ratio_mask"))
    for t in range(len(p)):  # one position at a time, so that no mask affects another position
        a = advantages[t]
        if request.loss_fn == "dro":
            beta = request.loss_config.get("beta", 0.05)
            total = total - (p[t] * a - 0.5 * beta * (p[t] - q[t]) ** 2)
            continue
        if a == 0:
            continue  # the term is 0 for any ratio
        log_ratio = shift + p[t] - p[t].detach() if request.loss_fn == "gspo" else p[t] - q[t]
        ratio = torch.exp(log_ratio)
        clipped = torch.minimum(torch.maximum(ratio, low[t]), high[t])
        if request.loss_fn == "importance_sampling":
            total = total - ratio * a
        elif request.loss_fn in ("ppo", "gspo"):
            gain, dual_clip = torch.minimum(ratio * a, clipped * a), float(request.loss_config.get("dual_clip", 0))
            total = total - (torch.maximum(gain, dual_clip * a) if dual_clip and a < 0 else gain)
        elif request.loss_fn == "cispo":
            total = total - clipped.detach() * p[t] * a
        else:
            raise AssertionError(f"the oracle has no loss {request.loss_fn}")
    return total


def _trinity(p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Dual-clip PPO with k2, averaged over a datum's masked tokens, over the number of datums of the whole batch."""
    epsilon, c, coefficient = config.get("clip_range", 0.2), config.get("clip_ratio_c", 3.0), config.get("kl_coef", 0.0)
    total, count = 0.0 * p.sum(), 0
    for t in range(len(p)):
        if inputs["weights"][t] == 0:
            continue
        count += 1
        a, ratio = inputs["advantages"][t], torch.exp(p[t] - inputs["logprobs"][t])
        token = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - epsilon, 1 + epsilon))
        total = total + (torch.minimum(token, -a * c) if a < 0 else token)
        if coefficient:
            total = total + coefficient * 0.5 * (p[t] - inputs["ref_logprobs"][t]) ** 2
    return total / max(count, 1) / config["num_total_datums"]


def terms(p: Tensor, whole: Tensor, datum: Datum, request: Pass) -> Tensor:
    """Entropy and KL terms of one datum's loss; `whole` is its log-softmax [N, V]."""
    config, total = request.loss_config, 0.0 * p.sum()
    counts = datum.inputs.get("weights" if request.loss_fn in ("cross_entropy", "trinity_ppo") else "advantages")
    counts = np.ones(p.shape) if counts is None else np.asarray(counts)
    default = (counts.reshape(len(p), -1) != 0).any(axis=1).astype(np.float64)
    for t in range(len(p)):
        if weight := float(datum.inputs.get("entropy_mask", default)[t]) * float(config.get("entropy_coef", 0.0)):
            total = total + weight * (whole[t].exp() * whole[t]).sum()
        if request.loss_fn == "trinity_ppo" or not config.get("kl_coef"):
            continue
        if weight := float(datum.inputs.get("kl_mask", default)[t]) * float(config["kl_coef"]):
            log_ratio = float(datum.inputs["ref_logprobs"][t]) - p[t]  # log(ref / p) at a token sampled from p
            estimate = {
                "k1": -log_ratio,
                "k2": log_ratio**2 / 2,
                "k3": (torch.exp(log_ratio) - 1) - log_ratio,
            }[str(config.get("kl_estimator", "k2"))]
            total = total + weight * estimate
    return total


_DEFAULT_CLIPS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}


def _clips(p: Tensor, inputs: dict[str, Tensor], request: Pass) -> tuple[Tensor, Tensor]:
    """Bounds per position: those of the datum, else of the request, else the default."""
    low, high = _DEFAULT_CLIPS.get(request.loss_fn, (0.0, float("inf")))
    low = request.loss_config.get("clip_low_threshold", low)
    high = request.loss_config.get("clip_high_threshold", high)
    return (
        inputs.get("clip_low_threshold", torch.full_like(p, low)),
        inputs.get("clip_high_threshold", torch.full_like(p, high)),
    )


def _sequence_shift(p: Tensor, q: Tensor, mask: Tensor | None) -> Tensor:
    """GSPO's mean log-ratio over the mask."""
    if mask is None or not (mask != 0).any():
        return p.new_zeros(())
    return (p.detach() - q)[mask != 0].mean()


def _pick(logprobs: Tensor, datum: Datum) -> Tensor:
    targets = torch.from_numpy(np.asarray(datum.targets, dtype=np.int64))
    columns = targets if targets.ndim == 2 else targets[:, None]
    return logprobs.gather(-1, columns).reshape(targets.shape)


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


@contextmanager
def tied_embeddings_are_meant() -> Iterator[None]:
    """Silence PEFT's warning that adapting a tied lm_head does not change the embeddings, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield
