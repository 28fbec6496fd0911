"""Images as a convolutional network is fed: their pixels exactly, of one size, in one or three channels."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from raystride.pipelines.config import Config, Data, Model, SettingError
from raystride.pipelines.sources.fields import data_uri
from raystride.pipelines.tasks import build_task
from raystride.pipelines.tasks.images import Images


def _uri(pixels: np.ndarray, kind: str = "PNG") -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _task(image: list[int] | None = None, **data: object) -> Images:
    config = Config(task="images", data=Data(**data), model=Model(channels=(4,), hidden=(8,)))  # type: ignore[arg-type]
    task = build_task(config, {"labels": ["0", "1"], "shares": [0.5, 0.5], "image": image or [1, 4, 6]})
    assert isinstance(task, Images)
    return task


@given(height=st.integers(1, 9), width=st.integers(1, 9), channels=st.sampled_from([1, 3]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_the_model_gets_every_pixel(height: int, width: int, channels: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    task = _task([channels, height, width])
    row, _ = task.encode((_uri(pixels[..., 0] if channels == 1 else pixels), "1"))
    (images,), labels = task.collate([row.astype(np.uint8)], None)
    assert images.dtype == torch.uint8
    assert images[0].permute(1, 2, 0).numpy().tolist() == pixels.tolist()
    assert labels.tolist() == [1]


def test_the_size_is_that_of_all_images_or_is_set() -> None:
    small, large = (_uri(np.zeros((size, size), np.uint8)) for size in (4, 5))
    task = _task()
    facts = task.learn([task.survey([(small, "a"), (small, "b")])])
    assert facts["image"] == [1, 4, 4]
    with pytest.raises(SettingError, match=r"data.image_size is None: the images have 2 sizes .*1x4x4, 1x5x5"):
        task.learn([task.survey([(small, "a")]), task.survey([(large, "b")])])
    chosen = _task(image_size=(3, 8, 8))
    assert chosen.learn([chosen.survey([(small, "a"), (large, "b")])])["image"] == [3, 8, 8]


def test_images_are_scaled_only_where_that_is_asked_for() -> None:
    picture = _uri(np.full((5, 5), 200, np.uint8))
    row, _ = _task([3, 8, 8], image_size=(3, 8, 8)).encode((picture, "0"))
    assert row.tolist() == [0, *[200] * (3 * 8 * 8)]
    with pytest.raises(ValueError, match=r"is an image of \(1, 5, 5\) .* the others have \(1, 4, 6\)"):
        _task().encode((picture, "0"))


def _png(chunk: bytes = b"", size: tuple[int, int] = (4, 6)) -> str:
    """A PNG of that size without pixels, and with a chunk that is given."""
    header = struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0)
    chunks = [b"IHDR" + header, chunk, b"IDAT" + zlib.compress(b""), b"IEND"]
    parts = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks if each]
    return data_uri(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "uri",
    [
        pytest.param(_png(size=(60_000, 60_000)), id="a bomb: DecompressionBombError"),
        pytest.param(_png(b"????"), id="a chunk without a name: SyntaxError"),
        pytest.param(_png(b"iCCPx"), id="a chunk that is cut"),
        pytest.param(_png(), id="no pixels"),
    ],
)
def test_a_broken_png_is_an_image_that_cannot_be_read(uri: str) -> None:
    with pytest.raises(ValueError, match="is no image that can be read"):
        _task().encode((uri, "0"))
    assert not _task().survey([(uri, "a")])["sizes"]


@pytest.mark.parametrize("uri", ["data:image/png;base64,AAAA", "data:image/png;base64,!", "no image", ""])
def test_what_is_no_image_is_named(uri: str) -> None:
    with pytest.raises(ValueError, match="is no image that can be read"):
        _task().encode((uri, "0"))
