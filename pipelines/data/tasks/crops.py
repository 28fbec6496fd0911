"""Crops of stored pictures: the middle in validation; in training, random crops from the random draws of a sample.

Pictures are stored in their final size, or resized by their shorter side, with height and width in front. Draws are numbers
in [0, 1) that follow from seed, epoch and sample. Between draws and pixels there are only operations that IEEE 754 and
Pillow round equally on every processor, so that pictures have the same bits on any machine.

    crop = Crop((3, 32, 32), "random", padding=4, flip=0.5)
    crop.cut_middle(pictures)                                 # (B, 3, 32, 32) uint8, of pictures (3, height, width)
    crop.cut_randomly(pictures, draws)                        # the same, of draws (B, crop.draws)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

MAX_ASPECT_RATIO = 4
"""Pictures with a larger ratio of sides are stored as their middle."""
MAX_TRIES = 8
"""Random rectangles tried before the middle is taken, if none lies inside the picture."""
SIZE_NUMBERS = 4
"""Numbers that encode height and width, two bytes each."""


def resize_shorter_side(picture: Any, shorter: int) -> Any:
    """Resizes a Pillow image to a shorter side, with its aspect kept, at most MAX_ASPECT_RATIO times as long."""
    width, height = picture.size
    most = MAX_ASPECT_RATIO * min(width, height)
    left, top = max(0, width - most) // 2, max(0, height - most) // 2
    box = (left, top, left + min(width, most), top + min(height, most))
    width, height = min(width, most), min(height, most)
    scale = shorter / min(width, height)
    return picture.resize((max(shorter, round(width * scale)), max(shorter, round(height * scale))), box=box)


def pack_with_size(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels (channels, height, width) uint8 as one vector, with their size in front."""
    _, height, width = pixels.shape
    return np.concatenate((np.array([height >> 8, height & 255, width >> 8, width & 255], np.uint8), pixels.reshape(-1)))


def unpack_pixels(row: np.ndarray, channels: int) -> np.ndarray:
    """Returns the pixels (channels, height, width) uint8 of a vector of `pack_with_size`."""
    high, low, wide, narrow = row[:SIZE_NUMBERS].tolist()
    return row[SIZE_NUMBERS:].astype(np.uint8, copy=False).reshape(channels, high << 8 | low, wide << 8 | narrow)


@dataclass(frozen=True)
class Crop:
    """Cropping of pictures to one size."""

    size: tuple[int, int, int]
    """Channels, height and width of the network's input."""
    kind: Literal["middle", "random", "scaled"] = "middle"
    """The middle; a random position; a random rectangle that is resized (Szegedy et al., 2015, section 6)."""
    padding: int = 0
    """Black pixels on each side that a random position may include."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Minimum and maximum fraction of a picture's area in a rectangle."""
    flip: float = 0.0
    """Probability of a horizontal flip."""

    @property
    def draws(self) -> int:
        """Random numbers needed for a picture; 0: cropping is deterministic."""
        if self.kind == "middle":
            return 1 if self.flip else 0
        return 3 if self.kind == "random" else 3 + 2 * MAX_TRIES

    def cut_middle(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the middles (B, *size) uint8."""
        return self._cut_rectangles(pictures, [self._middle_offset(picture) for picture in pictures])

    def cut_randomly(self, pictures: Sequence[np.ndarray], draws: np.ndarray) -> np.ndarray:
        """Returns the crops that the draws (B, `draws`) choose, (B, *size) uint8."""
        if self.kind == "random":
            cut = self._cut_rectangles(
                pictures, [self._random_offset(picture, *draw[1:3]) for picture, draw in zip(pictures, draws, strict=True)]
            )
        elif self.kind == "scaled":
            cut = np.empty((len(pictures), *self.size), np.uint8)
            for number, (picture, draw) in enumerate(zip(pictures, draws, strict=True)):
                cut[number] = self._cut_and_resize(picture, draw)
        else:
            cut = self.cut_middle(pictures)
        if self.flip:
            turned = draws[:, 0] < self.flip
            cut[turned] = cut[turned][..., ::-1]
        return cut

    def _middle_offset(self, picture: np.ndarray) -> tuple[int, int]:
        (_, height, width), (_, high, wide) = picture.shape, self.size
        return (height - high) // 2, (width - wide) // 2

    def _random_offset(self, picture: np.ndarray, down: float, right: float) -> tuple[int, int]:
        (_, height, width), (_, high, wide), pad = picture.shape, self.size, self.padding
        rows, columns = height - high + 2 * pad + 1, width - wide + 2 * pad + 1
        return int(down * rows) - pad, int(right * columns) - pad

    def _cut_rectangles(self, pictures: Sequence[np.ndarray], places: Sequence[tuple[int, int]]) -> np.ndarray:
        """Cuts rectangles of the size at these rows and columns; pixels outside their pictures are black."""
        _, high, wide = self.size
        cut = (np.zeros if self.padding else np.empty)((len(pictures), *self.size), np.uint8)
        for out, picture, (top, left) in zip(cut, pictures, places, strict=True):
            first, begin = max(0, top), max(0, left)
            part = picture[:, first : top + high, begin : left + wide]
            out[:, first - top : first - top + part.shape[1], begin - left : begin - left + part.shape[2]] = part
        return cut

    def _cut_and_resize(self, picture: np.ndarray, draw: np.ndarray) -> np.ndarray:
        from PIL import Image

        (channels, height, width), (_, high, wide) = picture.shape, self.size
        top, left, rows, columns = self._draw_rectangle(height, width, draw)
        part = picture[:, top : top + rows, left : left + columns]
        if (rows, columns) == (high, wide):
            return part
        image = Image.fromarray(part[0] if channels == 1 else np.ascontiguousarray(part.transpose(1, 2, 0)))
        pixels = np.asarray(image.resize((wide, high), Image.Resampling.BILINEAR))
        return pixels.reshape(high, wide, channels).transpose(2, 0, 1)

    def _draw_rectangle(self, height: int, width: int, draw: np.ndarray) -> tuple[int, int, int, int]:
        """Returns top, left, rows and columns of a rectangle of random area, with an aspect from 3/4 to 4/3; else the
        middle's."""
        least, most = self.scale
        for share, slant in draw[3:].reshape(MAX_TRIES, 2).tolist():
            area = height * width * (least + (most - least) * share)
            # No logarithm, which processors round differently: half of the aspects are the others' inverses.
            aspect = 1 + (2 * slant - 1) / 3 if slant >= 0.5 else 1 / (1 + (1 - 2 * slant) / 3)
            rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < rows <= height and 0 < columns <= width:
                top, left = int(draw[1] * (height - rows + 1)), int(draw[2] * (width - columns + 1))
                return top, left, rows, columns
        _, high, wide = self.size
        factor = min(height / high, width / wide)
        rows, columns = int(high * factor), int(wide * factor)
        return (height - rows) // 2, (width - columns) // 2, rows, columns
