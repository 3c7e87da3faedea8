"""Puts the images of requests in place: the model's placeholders instead of IMAGE_TOKEN, and each image's grid."""

from __future__ import annotations

from dataclasses import replace

from tinsmith.engine.base import Datum, ModelCard, Pass, SampleRequest
from tinsmith.engine.images.tower import VisionTower
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.plurals import counted


def placed_pass(request: Pass, vision: VisionTower | None, card: ModelCard) -> Pass:
    """The pass with its images in place. Raises BadRequest, TooLarge or Unsupported."""
    if not any(datum.images for datum in request.data):
        return request
    vision = _required(vision, card)
    data = (_placed_datum(f"data[{index}].model_input", datum, vision) for index, datum in enumerate(request.data))
    return replace(request, data=tuple(data))


def placed_prompt(request: SampleRequest, vision: VisionTower | None, card: ModelCard) -> SampleRequest:
    """The request with its images in place. Raises BadRequest, TooLarge or Unsupported."""
    if not request.images:
        return request
    tokens, images = _required(vision, card).place("The prompt", request.prompt, request.images)
    return replace(request, prompt=tokens, images=images)


def _placed_datum(where: str, datum: Datum, vision: VisionTower) -> Datum:
    if not datum.images:
        return datum
    tokens, images = vision.place(where, datum.tokens, datum.images)
    if len(tokens) != len(datum.targets):
        raise BadRequest(
            f"{where} has {counted(len(tokens), 'token')} with those of its images, and target_tokens "
            f"{len(datum.targets)}.",
            "Give targets for the tokens of images too, with weight 0.",
        )
    return replace(datum, tokens=tokens, images=images)


def _required(vision: VisionTower | None, card: ModelCard) -> VisionTower:
    if vision is None:
        raise Unsupported(f"{card.source} takes no images.", "Send text only, or serve a vision-language model.")
    return vision
