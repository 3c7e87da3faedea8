"""A pass of a training run: its loss on the scores of micro-batches, and its results so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import Datum, Pass, PassResult
from tinsmith.engine.custom_loss.process import LossProcess, RequestLoss
from tinsmith.engine.images.rows import predicts_image
from tinsmith.engine.training import loss_specs, losses
from tinsmith.engine.training.run_rows import RunItem
from tinsmith.errors import BadRequest

CHECK_INPUTS = "Check logprobs and advantages: the ratio exp(p - q) may have overflowed."
_DIVERGED = "Load a saved state and continue from it with a lower learning_rate."


class PassState:
    """A pass with the results of its data so far."""

    def __init__(self, request: Pass, losses: LossProcess | None) -> None:
        self._request = request
        self.needs_entropy = loss_specs.needs_entropy(request)
        self.logprobs = _empty_arrays([datum.targets.shape for datum in request.data])
        """float32 of the targets' shape, by datum."""
        self.entropies = _empty_arrays([datum.tokens.shape for datum in request.data] if self.needs_entropy else [])
        """float32 [N], by datum; empty unless the pass needs them."""
        self.metrics: dict[str, float] = {"loss:sum": 0.0}
        """Sums over the data so far."""
        self._uploaded = RequestLoss(losses, request.graph) if losses and request.graph is not None else None

    def add(self, items: Sequence[RunItem], logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Keep the scores of some data and add their loss; returns d loss / d logprob and d loss / d entropy."""
        entropies = entropies if self.needs_entropy else None
        self._store(items, logprobs, entropies)
        self._compare_logprobs(items)
        grad, grad_of_entropy = self._loss(items, logprobs, entropies)
        if any(item.datum.images for item in items):
            _check_image_targets(items, grad)
        return grad, grad_of_entropy

    def _store(self, items: Sequence[RunItem], logprobs: Tensor, entropies: Tensor | None) -> None:
        """Keep the log-probabilities [targets] and entropies [positions] of some data, each concatenated."""
        if not bool(logprobs.isfinite().all()):  # checked here because a loss may not read all of them
            raise BadRequest("This model's logprobs are not finite: it has diverged.", _DIVERGED)
        _copy_into(self.logprobs, items, logprobs.split([item.datum.targets.size for item in items]))
        if entropies is not None:
            _copy_into(self.entropies, items, entropies.split([len(item.datum.tokens) for item in items]))

    def _compare_logprobs(self, items: Sequence[RunItem]) -> None:
        """Add how far the logprobs of data with a record are from the sampler's, where these are not 0."""
        for item in items:
            sampled = item.datum.inputs.get("logprobs")
            if item.recorded is not None and sampled is not None and sampled.any():
                gap = np.abs(self.logprobs[item.datum_index] - sampled)[sampled != 0]
                self.add_metrics({"logprob_mismatch:mean": float(gap.mean())})

    def _loss(
        self, items: Sequence[RunItem], logprobs: Tensor, entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the loss and metrics of some data; returns d loss / d logprob and d loss / d entropy."""
        if self._uploaded is not None:
            return self._uploaded_loss(self._uploaded, items, logprobs), None
        request, data = self._request, [item.datum for item in items]
        leaf = logprobs.double().requires_grad_()
        entropy_leaf = entropies.double().requires_grad_() if entropies is not None else None
        sizes = [datum.targets.size for datum in data]
        targets = losses.LossInputs(
            logprobs=leaf,
            entropies=entropy_leaf,
            sequence=torch.as_tensor(np.repeat(np.arange(len(data)), sizes), device=leaf.device),
            inputs={
                name: torch.as_tensor(values, device=leaf.device).double()
                for name, values in _concatenated_inputs(request, data).items()
            },
        )
        settings, estimator = loss_specs.numeric_settings(request), loss_specs.kl_estimator(request)
        with torch.enable_grad():
            loss, metrics = losses.objective(request.loss_fn, targets, settings, estimator, request.loss_config)
        leaves = [leaf] if entropy_leaf is None else [leaf, entropy_leaf]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        self._check_finite(loss, *grads)
        self.add_metrics({name: float(value.detach()) for name, value in {"loss:sum": loss, **metrics}.items()})
        return grads[0].float(), grads[1].float() if entropy_leaf is not None else None

    def result(self) -> PassResult:
        """Metrics are sums over the data; those named `:mean` are divided by the number of data."""
        count = len(self._request.data)
        metrics = {
            name: value / count if name.endswith(":mean") else float(value) for name, value in self.metrics.items()
        }
        entropies = tuple(self.entropies) if self._request.loss_config.get("return_entropy") else None
        return PassResult(logprobs=tuple(self.logprobs), metrics=metrics, entropies=entropies)

    def _uploaded_loss(self, uploaded: RequestLoss, items: Sequence[RunItem], logprobs: Tensor) -> Tensor:
        """The same for a loss that a client uploaded, datum by datum."""
        pieces = logprobs.cpu().split([item.datum.targets.size for item in items])
        data = [
            (piece.numpy().reshape(item.datum.targets.shape), item.datum.inputs)
            for item, piece in zip(items, pieces, strict=True)
        ]
        grads = []
        for end in uploaded.run(data):
            grad = torch.from_numpy(end.grad)
            self._check_finite(torch.tensor(end.loss, device=grad.device), grad)
            self.add_metrics({"loss:sum": end.loss, **end.metrics})
            grads.append(grad.reshape(-1))
        return torch.cat(grads).to(logprobs.device)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add values to the pass's metrics."""
        self.metrics.update({name: self.metrics.get(name, 0.0) + value for name, value in metrics.items()})

    def _check_finite(self, loss: Tensor, *grads: Tensor) -> None:
        if not bool(torch.isfinite(loss)) or not all(bool(torch.isfinite(grad).all()) for grad in grads):
            value = float(loss.detach())
            raise BadRequest(f"The {self._request.loss_fn} loss of this request is {value}.", CHECK_INPUTS)


def _check_image_targets(items: Sequence[RunItem], grad: Tensor) -> None:
    """Raise BadRequest for a loss with a gradient at a target that is a token of an image."""
    pieces = grad.split([item.datum.targets.size for item in items])
    for item, piece in zip(items, pieces, strict=True):
        mask = torch.as_tensor(np.repeat(predicts_image(item.datum), item.targets_per_position), device=grad.device)
        if bool(piece[mask].any()):
            raise BadRequest(
                f"The loss depends on the logprob of a token of an image in data[{item.datum_index}].",
                "Multiply these logprobs by 0.",
            )


def _empty_arrays(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """An uninitialized float32 array of each shape, all views of one allocation.

    Thousands of small arrays allocated during a run would fragment the heap between activations.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64)
    pieces = np.split(np.empty(ends[-1] if shapes else 0, np.float32), ends)[: len(shapes)]
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _copy_into(arrays: Sequence[np.ndarray], items: Sequence[RunItem], values: Sequence[Tensor]) -> None:
    for item, tensor in zip(items, values, strict=True):
        array = arrays[item.datum_index]
        array[...] = tensor.cpu().numpy().reshape(array.shape)


def _concatenated_inputs(request: Pass, data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Each loss input of the data, flat and concatenated."""
    by_datum = [loss_specs.loss_inputs(request, datum) for datum in data]
    return {name: np.concatenate([inputs[name] for inputs in by_datum]) for name in by_datum[0]}
