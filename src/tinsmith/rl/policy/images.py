"""Images of prompts: how many tokens a model sees of each, and their places among token ids.

The number of tokens comes from the model's own image processor, which is loaded from where its tokenizer is. Files are
decoded by the server; here only their headers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from tinsmith.errors import UserError
from tinsmith.plurals import counted
from tinsmith.rl.types import EncodedPrompt, Image, PlacedImage


class ImageEncoder:
    """Puts the placeholders of a model's images among tokens."""

    def __init__(self, patches: Callable[[int, int, dict[str, Any]], int], merge_size: int, token_id: int) -> None:
        """`patches` returns the number of patches of an image by height, width and options of its processor.

        A token of an image is a square of `merge_size` patches; `token_id` is its placeholder.
        """
        self._patches, self._merge_size, self._token_id = patches, merge_size, token_id

    @classmethod
    def load(cls, source: str) -> ImageEncoder | None:
        """The encoder of the model whose files are at a folder or hub id; None if it takes no images."""
        from transformers import AutoConfig, AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(source, backend="pil")
            token_id = AutoConfig.from_pretrained(source).image_token_id
            return cls(processor.get_number_of_image_patches, processor.merge_size, token_id)
        except (OSError, ValueError, AttributeError, ImportError):
            return None

    def count(self, image: Image) -> int:
        """Number of tokens that the model sees of an image. Raises UserError for a file that is no image."""
        from PIL import Image as Files

        try:
            with Files.open(BytesIO(image.file), formats=[image.format.upper()]) as file:
                width, height = file.size
            patches = self._patches(height, width, {})
        except (OSError, ValueError, Files.DecompressionBombError) as error:
            raise UserError(f"An image is not a readable {image.format} file: {error}.", "Replace the file.") from error
        return patches // self._merge_size**2

    def place(self, ids: Sequence[int], images: Sequence[Image], start: int = 0) -> EncodedPrompt:
        """Rendered tokens, which have one placeholder for each image, with as many as each image has tokens.

        `start` is the position of the first token. Raises UserError for another number of placeholders.
        """
        if (places := sum(token == self._token_id for token in ids)) != len(images):
            raise UserError(
                f"The rendered messages have {counted(places, 'placeholder')} of images for "
                f"{counted(len(images), 'image')}.",
                "Remove the placeholder from the text, or use a chat template that takes images.",
            )
        tokens, placed, waiting = list[int](), list[PlacedImage](), iter(images)
        for token in ids:
            if token != self._token_id:
                tokens.append(token)
                continue
            image = next(waiting)
            placed.append(PlacedImage(image=image, start=start + len(tokens), length=self.count(image)))
            tokens += [token] * placed[-1].length
        return EncodedPrompt(tokens=tuple(tokens), images=tuple(placed))

    def shortened(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with one placeholder in place of neighbouring ones, for people to read."""
        pairs = zip([None, *tokens], tokens, strict=False)
        return [token for before, token in pairs if token != self._token_id or before != token]
