"""The frozen vision tower of a model: image files -> features that replace the embeddings of an image's tokens.

`detach` takes the tower out of a loaded vision-language model, so that the rest is a text model whose modules are all
adapted, packed and checked as any other's. Supported are towers of the family of Qwen3-VL and Qwen3.5, through
transformers' own image processor and modules. Its PIL variant is used wherever that runs, so that features are the same
on every machine. Each image is computed alone: features depend on nothing but the image.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tinsmith.engine.base import ImageSupport, InputImage
from tinsmith.engine.images.files import check_pixels, decoded, digest
from tinsmith.engine.images.rows import ImageTokens
from tinsmith.errors import BadRequest, EngineError

log = logging.getLogger(__name__)

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Types of vision-language models whose tower is supported."""
CACHE_BYTES = 512 * 2**20
"""Features that are kept for further passes."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What a model sees of an image of N tokens."""

    embeddings: Tensor
    """[N, D]: in place of the token embeddings."""
    deepstack: tuple[Tensor, ...]
    """[N, D] each: added to the hidden states after the first layers, one tensor for each."""

    @property
    def nbytes(self) -> int:
        return self.embeddings.nbytes + sum(tensor.nbytes for tensor in self.deepstack)


@dataclass(frozen=True, slots=True)
class VisualInputs:
    """Features of all images' tokens in a pass of T tokens."""

    at: Tensor
    """int64 [M]: their positions, rising."""
    embeddings: Tensor
    """[M, D]."""
    deepstack: tuple[Tensor, ...]
    """[M, D] each."""

    def embedded(self, embeddings: Tensor) -> Tensor:
        """Token embeddings [T, D] with the images' in place."""
        return embeddings.index_copy(0, self.at, self.embeddings.to(embeddings.dtype))

    def settings(self, length: int) -> dict[str, Any]:
        """Further arguments of the body of a model, for a pass of T = `length` tokens."""
        if not self.deepstack:
            return {}
        mask = torch.zeros(1, length, dtype=torch.bool, device=self.at.device)
        mask[0, self.at] = True
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(self.deepstack)}


class VisionTower:
    """Computes the features of images, each once as long as they are cached."""

    def __init__(self, owner: nn.Module, processor: Any, token_id: int, merge: int, cache_bytes: int) -> None:
        """`owner`: transformers' module whose `get_image_features` computes them."""
        self._owner, self._processor = owner, processor
        self._token_id, self._merge, self._cache_bytes = token_id, merge, cache_bytes
        self._features: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self.computed = 0
        """Number of images computed so far."""

    @property
    def support(self) -> ImageSupport:
        return ImageSupport(processor=type(self._processor).__name__, token_id=self._token_id)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._owner.parameters())

    def place(
        self, where: str, tokens: np.ndarray, images: Sequence[InputImage]
    ) -> tuple[np.ndarray, tuple[InputImage, ...]]:
        """Tokens with the model's placeholders, and the images with their grids. Decodes headers only.

        Raises BadRequest for a file that is no image, or one whose number of tokens is not the expected one.
        """
        pieces, placed, end, added = [], list[InputImage](), 0, 0
        sizes = check_pixels(where, images)
        for number, (image, size) in enumerate(zip(images, sizes, strict=True)):
            rows, columns = self._grid(f"{where}: image {number}", *size)
            if image.length and image.length != rows * columns:
                raise BadRequest(
                    f"{where}: image {number} has expected_tokens {image.length}; this model sees it as {rows} x "
                    f"{columns} = {rows * columns} tokens.",
                    "Compute expected_tokens with the image processor of this model.",
                )
            pieces += [tokens[end : image.start], np.full(rows * columns, self._token_id, tokens.dtype)]
            end = image.start + image.length
            placed.append(
                replace(
                    image,
                    start=image.start + added,
                    length=rows * columns,
                    grid=(rows, columns),
                    digest=digest(image),
                )
            )
            added += rows * columns - image.length
        pieces.append(tokens[end:])
        return np.concatenate(pieces), tuple(placed)

    def inputs(self, parts: Sequence[ImageTokens], device: torch.device) -> VisualInputs | None:
        """Features of the images' tokens in a pass; None if there are none."""
        parts = [part for part in parts if len(part.at)]
        if not parts:
            return None
        at = np.concatenate([part.at for part in parts])
        order = torch.as_tensor(np.argsort(at), device=device)
        steps = [torch.as_tensor(part.steps, device=device) for part in parts]
        features = [self._cached(part.image) for part in parts]
        deepstack = zip(*(image.deepstack for image in features), strict=True)
        return VisualInputs(
            torch.as_tensor(np.sort(at), device=device),
            _gathered([image.embeddings for image in features], steps)[order],
            tuple(_gathered(layer, steps)[order] for layer in deepstack),
        )

    def shrink(self, max_bytes: int) -> None:
        """Drop cached features, the least recently used first, until they take at most `max_bytes`."""
        held = sum(features.nbytes for features in self._features.values())
        while held > max_bytes:
            held -= self._features.popitem(last=False)[1].nbytes

    def _grid(self, where: str, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image with this size."""
        processor, side = self._processor, self._processor.patch_size * self._merge
        limits = processor.size["shortest_edge"], processor.size["longest_edge"]
        try:
            resized = smart_resize(height, width, side, min_pixels=limits[0], max_pixels=limits[1])
        except ValueError as error:
            raise BadRequest(f"{where} cannot be resized: {error}.", "Crop it.") from error
        return resized[0] // side, resized[1] // side

    def _cached(self, image: InputImage) -> ImageFeatures:
        features = self._features.get(image.digest)
        if features is None:
            features = self._computed(image)
            self._features[image.digest] = features
        self._features.move_to_end(image.digest)
        self.shrink(max(self._cache_bytes, features.nbytes))
        return features

    @torch.no_grad()
    def _computed(self, image: InputImage) -> ImageFeatures:
        pixels = decoded("An image", image)
        inputs = self._processor(images=[pixels], return_tensors="pt")
        _, rows, columns = (inputs["image_grid_thw"][0] // torch.tensor([1, self._merge, self._merge])).tolist()
        if (rows, columns) != image.grid:
            raise EngineError(f"The image processor gives {rows} x {columns} tokens instead of {image.grid}.")
        weight = next(self._owner.parameters())
        output = self._owner.get_image_features(  # type: ignore[operator]
            inputs["pixel_values"].to(weight.device, weight.dtype),
            inputs["image_grid_thw"].to(weight.device),
            return_dict=True,
        )
        self.computed += 1
        deepstack = output.get("deepstack_features") or ()
        return ImageFeatures(output.pooler_output[0], tuple(layer[0] for layer in deepstack))


def processor_of(folder: str, config: PreTrainedConfig) -> Qwen2VLImageProcessorPil | None:
    """The image processor of a checkpoint; None if its model or its processor is not supported."""
    if config.model_type not in MODEL_TYPES or not Path(folder, "preprocessor_config.json").is_file():
        return None
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if not isinstance(processor, Qwen2VLImageProcessorPil):
        log.warning("%s: images are refused, for its image processor is a %s.", folder, type(processor).__name__)
        return None
    return processor


def auto_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Loads the text model of this config: alone, or with its tower where transformers has no class for it alone."""
    alone = config.model_type not in MODEL_TYPES or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if alone else AutoModelForImageTextToText


def without_weights(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, *, with_tower: bool = False
) -> PreTrainedModel:
    """The model of this config on PyTorch's meta device, where parameters have shapes and no memory.

    `dtype` is the config's by default; `with_tower` if its vision tower is loaded too.
    """
    auto = AutoModelForImageTextToText if with_tower else auto_class(config)
    with torch.device("meta"):
        return auto.from_config(config, **({} if dtype is None else {"dtype": dtype}))


def detach(
    model: PreTrainedModel, processor: Any, cache_bytes: int = CACHE_BYTES
) -> tuple[PreTrainedModel, VisionTower]:
    """The text model and the vision tower of a vision-language model, which share its memory.

    The text model has the class that AutoModelForCausalLM would load, if there is one, else it is `model` without its
    tower: names of its modules, and so of adapters, are the same with and without images.
    """
    config, whole = model.config, model.base_model
    owner = copy.copy(whole)  # its own list of submodules, of which only the tower stays
    owner._modules = {"visual": whole.get_submodule("visual")}
    own_config = copy.deepcopy(config)
    own_config.vision_config._attn_implementation = "sdpa"  # memory linear in the number of patches
    for module in owner.modules():
        if "config" in vars(module):
            vars(module)["config"] = own_config if module is owner else own_config.vision_config
    del whole.visual
    merge = config.vision_config.spatial_merge_size
    tower = VisionTower(owner, processor, config.image_token_id, merge, cache_bytes)
    return _text_model(model), tower


def _text_model(model: PreTrainedModel) -> PreTrainedModel:
    text_config = model.config.get_text_config()
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return model
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(text_config, attn_implementation="eager")
    text.model = model.base_model.get_submodule("language_model")
    text.lm_head = model.get_submodule("lm_head")
    text.generation_config = model.generation_config
    return text


def _gathered(tensors: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor[rows] for tensor, rows in zip(tensors, steps, strict=True)])
