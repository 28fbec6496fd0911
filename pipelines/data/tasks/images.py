"""Classification of images by a convolutional network.

An example is the label's number and the pixels, uint8, channel by channel, row by row. All images have the size of
`data.image_size`, or else one common size. With `data.image_shorter_side` they are larger, begin with their height and
width, and are cropped by the feed.

    task = Images(config, {"labels": ["0", "1"], "image": [1, 8, 8]})
    (images,), labels = task.collate(rows, None)             # images (B, 1, 8, 8) uint8, labels (B) int64
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.model.shape import convnet_flops
from raystride.pipelines.config import SettingError
from raystride.pipelines.data.tasks.crops import Crop, pack_with_size, resize_shorter_side, unpack_pixels
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.tasks.pictures import open_picture, picture_size, read_picture_size
from raystride.pipelines.data.tasks.task import Column, Document, Facts, Inputs, Rows

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.convnet import ConvNet

MODES = {1: "L", 3: "RGB"}
"""Pillow's names for images of one channel and of three."""


class Images(LabelTask):
    """Classification of images by a convolutional network, with one label an image."""

    unit = "images"
    tokenizers = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The image and its label."""
        return (Column("data.image_column", self.config.data.image_column, "image"), self.label_column)

    @property
    def ids(self) -> int:
        """An upper bound of the numbers in an example: 256 for pixels, and the number of labels."""
        return max(256, len(self.labels))

    @property
    def image(self) -> tuple[int, int, int]:
        """The size of every image: channels, height and width."""
        channels, height, width = self.facts["image"]
        return int(channels), int(height), int(width)

    def survey(self, documents: Iterable[Document]) -> Facts:
        """Counts the labels and the sizes of images.

        One image of each size is decoded: a size that only broken images have is none. Other broken ones are found when they
        are encoded.
        """
        labels: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        unread = ""
        for image, label in documents:
            labels[label] += 1
            if not self.config.data.image_size:
                try:
                    size = "x".join(map(str, read_picture_size(image) or ()))
                    if size not in sizes:
                        size = "x".join(map(str, picture_size(open_picture(image))))
                    sizes[size] += 1
                except ValueError as error:
                    unread = unread or str(error)
        return {"labels": labels, "sizes": sizes, "unread": unread}

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """Returns the labels, and the common size of images. Raises SettingError if they have several and none is set."""
        labels, sizes = super().learn(surveys), sum((Counter(survey["sizes"]) for survey in surveys), Counter[str]())
        if self.config.data.image_size:
            return {**labels, "image": list(self.config.data.image_size)}
        if len(sizes) != 1:
            unread = next((f": one {survey['unread']}" for survey in surveys if survey.get("unread")), "")
            found = ", ".join(size for size, _ in sizes.most_common(5)) or f"no image that could be read{unread}"
            raise SettingError(
                f"data.image_size is None: the images have {len(sizes)} sizes (channels x height x width: {found}), so it "
                "must say to which they are scaled, for instance [3, 32, 32]",
                setting="data.image_size",
            )
        return {**labels, "image": [int(part) for part in next(iter(sizes)).split("x")]}

    def shaped_by(self) -> dict[str, Any]:
        """Returns the other inputs of examples: the size of images."""
        data = self.config.data
        larger = {"image_shorter_side": data.image_shorter_side} if data.image_shorter_side else {}
        return {"image_size": data.image_size, **larger}

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        """Returns the label's number, 0 without a label, and the pixels. Raises ValueError for no image, or one of another
        size."""
        label = self.label_number(document[1]) if len(document) > 1 else 0
        picture, (channels, height, width) = open_picture(document[0]), self.image
        if not self.config.data.image_size and picture_size(picture) != self.image:
            raise ValueError(
                f"is an image of {picture_size(picture)} (channels, height, width), the others have {self.image}"
            )
        shorter, picture = self.config.data.image_shorter_side, picture.convert(MODES[channels])
        picture = resize_shorter_side(picture, shorter) if shorter else picture.resize((width, height))
        pixels = np.asarray(picture).reshape(picture.height, picture.width, channels).transpose(2, 0, 1)
        return np.concatenate(([np.uint32(label)], pack_with_size(pixels) if shorter else pixels.reshape(-1))), None

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns no image, since its file is not stored, and the label."""
        return "", self.labels[int(ids[0])]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns images (B, channels, height, width) uint8 and labels (B)."""
        import torch

        if self.config.data.image_shorter_side:
            return (torch.from_numpy(self._build_crop(self.image).cut_middle(self._unpack_pictures(rows))),), self.targets(
                rows, masks
            )
        pixels = np.stack([row[1:] for row in rows]).astype(np.uint8, copy=False)
        return (torch.from_numpy(pixels).view(len(rows), *self.image),), self.targets(rows, masks)

    @property
    def draws(self) -> int:
        """The number of random numbers for crop and flip of an image."""
        return self._build_crop(self.image).draws

    def collate_drawn(self, rows: Rows, masks: Rows | None, draws: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """Returns the same as `collate`, with random crops from the draws."""
        import torch

        cropped = self._build_crop(self.image).cut_randomly(self._unpack_pictures(rows), draws)
        return (torch.from_numpy(cropped),), self.targets(rows, masks)

    def _unpack_pictures(self, rows: Rows) -> list[np.ndarray]:
        """Returns the pixels of some examples, each (channels, height, width)."""
        if self.config.data.image_shorter_side:
            return [unpack_pixels(row[1:], self.image[0]) for row in rows]
        return [row[1:].astype(np.uint8, copy=False).reshape(self.image) for row in rows]

    def _build_crop(self, size: tuple[int, int, int]) -> Crop:
        data = self.config.data
        return Crop(size, data.image_crop, data.image_padding, data.image_scale, data.image_flip)

    def tokens_of(self, numbers: float) -> float:
        """Returns 1: an image counts as one token."""
        return 1.0

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float:
        """Returns the training operations per image: a token here."""
        shape = self.config.model
        return convnet_flops(self.image, len(self.labels), channels=shape.channels, hidden=shape.hidden)

    def build_model(self) -> "ConvNet":
        """Returns a freshly initialised convolutional network. Raises SettingError if `data.image_mean` has another channel
        count."""
        from raystride.model.convnet import ConvNet

        model, objective, data = self.config.model, self.config.objective, self.config.data
        if data.image_mean and len(data.image_mean) != self.image[0]:
            raise data.error("image_mean", f"must have a number for each of the images' {self.image[0]} channels")
        return ConvNet(
            self.image,
            len(self.labels),
            channels=model.channels,
            hidden=model.hidden,
            loss=objective.loss,
            label_smoothing=objective.label_smoothing,
            linear=model.linear,
            mean=data.image_mean,
            deviation=data.image_std,
        )
