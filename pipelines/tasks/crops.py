"""Which pixels of a stored picture a network sees: the middle in validation, in training what the draws of a sample say.

Pictures are stored as they are fed, or with their shorter side of some pixels and their height and width before them. Draws
are numbers in [0, 1) that follow from seed, epoch and sample. From them to pixels there are only operations that IEEE 754
and Pillow round alike on every processor, so that pictures have the same bits wherever they are cropped.

    crop = Crop((3, 32, 32), "random", padding=4, flip=0.5)
    crop.middle(pictures)                                     # (B, 3, 32, 32) uint8, of pictures (3, height, width)
    crop.drawn(pictures, draws)                               # the same, of draws (B, crop.draws)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

LONGEST = 4
"""Of a picture that is longer than so many times its shorter side, the middle is stored."""
TRIES = 8
"""Rectangles that are drawn before the middle is taken, since none was inside the picture."""
HEAD = 4
"""Numbers that tell height and width, two bytes each."""


def shrunk(picture: Any, shorter: int) -> Any:
    """A Pillow image with that shorter side, its aspect kept, at most LONGEST times as long."""
    width, height = picture.size
    most = LONGEST * min(width, height)
    left, top = max(0, width - most) // 2, max(0, height - most) // 2
    box = (left, top, left + min(width, most), top + min(height, most))
    width, height = min(width, most), min(height, most)
    scale = shorter / min(width, height)
    return picture.resize((max(shorter, round(width * scale)), max(shorter, round(height * scale))), box=box)


def with_size(pixels: np.ndarray) -> np.ndarray:
    """Pixels (channels, height, width) uint8 as one vector that tells their size."""
    _, height, width = pixels.shape
    return np.concatenate((np.array([height >> 8, height & 255, width >> 8, width & 255], np.uint8), pixels.reshape(-1)))


def pixels_of(row: np.ndarray, channels: int) -> np.ndarray:
    """The pixels (channels, height, width) uint8 of such a vector."""
    high, low, wide, narrow = row[:HEAD].tolist()
    return row[HEAD:].astype(np.uint8, copy=False).reshape(channels, high << 8 | low, wide << 8 | narrow)


@dataclass(frozen=True)
class Crop:
    """How pictures are cut to one size."""

    size: tuple[int, int, int]
    """Channels, height and width of what the network sees."""
    kind: Literal["middle", "random", "scaled"] = "middle"
    """The middle; a place that is drawn; a rectangle that is drawn and scaled (Szegedy et al., 2015, section 6)."""
    padding: int = 0
    """Black pixels on each side of which a place may have some."""
    scale: tuple[float, float] = (0.08, 1.0)
    """The least and the largest share of a picture's area that a rectangle has."""
    flip: float = 0.0
    """How probably left and right are exchanged."""

    @property
    def draws(self) -> int:
        """Numbers that are drawn for a picture; 0: nothing is left to chance."""
        if self.kind == "middle":
            return 1 if self.flip else 0
        return 3 if self.kind == "random" else 3 + 2 * TRIES

    def middle(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """The middles (B, *size) uint8."""
        return self._cut(pictures, [self._middle(picture) for picture in pictures])

    def drawn(self, pictures: Sequence[np.ndarray], draws: np.ndarray) -> np.ndarray:
        """What the draws (B, `draws`) choose of the pictures, (B, *size) uint8."""
        if self.kind == "random":
            cut = self._cut(pictures, [self._place(each, *draw[1:3]) for each, draw in zip(pictures, draws, strict=True)])
        elif self.kind == "scaled":
            cut = np.empty((len(pictures), *self.size), np.uint8)
            for number, (picture, draw) in enumerate(zip(pictures, draws, strict=True)):
                cut[number] = self._scaled(picture, draw)
        else:
            cut = self.middle(pictures)
        if self.flip:
            turned = draws[:, 0] < self.flip
            cut[turned] = cut[turned][..., ::-1]
        return cut

    def _middle(self, picture: np.ndarray) -> tuple[int, int]:
        (_, height, width), (_, high, wide) = picture.shape, self.size
        return (height - high) // 2, (width - wide) // 2

    def _place(self, picture: np.ndarray, down: float, right: float) -> tuple[int, int]:
        (_, height, width), (_, high, wide), pad = picture.shape, self.size, self.padding
        rows, columns = height - high + 2 * pad + 1, width - wide + 2 * pad + 1
        return int(down * rows) - pad, int(right * columns) - pad

    def _cut(self, pictures: Sequence[np.ndarray], places: Sequence[tuple[int, int]]) -> np.ndarray:
        """Rectangles of the size from these rows and columns on, black where they lie beside their pictures."""
        _, high, wide = self.size
        cut = (np.zeros if self.padding else np.empty)((len(pictures), *self.size), np.uint8)
        for out, picture, (top, left) in zip(cut, pictures, places, strict=True):
            first, begin = max(0, top), max(0, left)
            part = picture[:, first : top + high, begin : left + wide]
            out[:, first - top : first - top + part.shape[1], begin - left : begin - left + part.shape[2]] = part
        return cut

    def _scaled(self, picture: np.ndarray, draw: np.ndarray) -> np.ndarray:
        from PIL import Image

        (channels, height, width), (_, high, wide) = picture.shape, self.size
        top, left, rows, columns = self._rectangle(height, width, draw)
        part = picture[:, top : top + rows, left : left + columns]
        if (rows, columns) == (high, wide):
            return part
        image = Image.fromarray(part[0] if channels == 1 else np.ascontiguousarray(part.transpose(1, 2, 0)))
        pixels = np.asarray(image.resize((wide, high), Image.Resampling.BILINEAR))
        return pixels.reshape(high, wide, channels).transpose(2, 0, 1)

    def _rectangle(self, height: int, width: int, draw: np.ndarray) -> tuple[int, int, int, int]:
        """Top, left, rows and columns: of such an area, with an aspect from 3/4 to 4/3; else as much of the middle."""
        least, most = self.scale
        for share, slant in draw[3:].reshape(TRIES, 2).tolist():
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
