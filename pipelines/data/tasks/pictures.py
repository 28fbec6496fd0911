"""Opens pictures, upright and with 8 bits a channel: one table of Pillow's modes, for training and prediction alike.

16 bits are scaled by the format's maximum. A mode without one, such as floating-point numbers, is refused: Pillow would clip
its values at 255.

    picture = open_picture("data:image/png;base64,...")      # of a mode in CHANNELS, with 8 bits
    picture_size(picture)                                    # (1, 28, 28)
    read_picture_size("data:image/png;base64,...")           # the same without decoding
"""

import base64
import io
from contextlib import suppress
from typing import Any

import numpy as np

from raystride.pipelines.data.first_bytes import HEAD_BYTES, IMAGE, find_foreign_format

CHANNELS = {
    "1": 1, "L": 1,
    "LA": 3, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "RGBa": 3, "RGBX": 3, "CMYK": 3, "YCbCr": 3, "HSV": 3,
}  # fmt: skip
"""Pillow's modes of 8 bits or one, which it converts to grey and to RGB, with the channels of the network's input."""
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of grey pictures with up to 16 bits, in any order of bytes. It reduces 16 bits of colour itself."""

_SIZED_BY_HEADER = ("BMP", "JPEG", "MPO", "PNG", "WEBP")
"""Pillow's formats whose size and mode are final before decoding."""
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Bytes of a PNG that may be turned."""


def open_picture(uri: str) -> Any:
    """Returns the upright picture in a data URI, in a mode of CHANNELS. Raises ValueError if it cannot be read."""
    import struct
    import zlib

    from PIL import Image, ImageOps

    # For broken files, and decompression bombs, Pillow's readers raise more errors than documented.
    broken = (ValueError, OSError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
    content = b""
    try:
        content = _decode_uri(uri)
        picture = Image.open(io.BytesIO(content))
        picture.load()
    except broken as error:
        if found := find_foreign_format(content[:HEAD_BYTES], expected=IMAGE):
            raise ValueError(f"is no image but {found.format}: {found.remedy}") from error
        raise ValueError(f"is no image that can be read: {error}") from error
    with suppress(*broken, KeyError, TypeError):  # pictures with unreadable EXIF data are not turned
        ImageOps.exif_transpose(picture, in_place=True)  # orientation of the camera
    return _to_8_bits(picture)


def picture_size(picture: Any) -> tuple[int, int, int]:
    """Returns channels (1 or 3), height and width."""
    return CHANNELS[picture.mode], picture.height, picture.width


def read_picture_size(uri: str) -> tuple[int, int, int] | None:
    """Returns the `picture_size` of the upright picture in a data URI by its header; None if only decoding it tells."""
    from PIL import ExifTags, Image

    try:
        content = _decode_uri(uri)
        picture = Image.open(io.BytesIO(content))
        is_known = picture.format in _SIZED_BY_HEADER and picture.mode in CHANNELS
        # The EXIF data of a PNG may follow its pixels.
        if not is_known or (picture.format == "PNG" and any(mark in content for mark in _PNG_ORIENTATION)):
            return None
        is_turned = picture.format != "PNG" and picture.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    except Exception:  # decoding it reports the fault
        return None
    channels, height, width = picture_size(picture)
    return (channels, width, height) if is_turned else (channels, height, width)


def _decode_uri(uri: str) -> bytes:
    return base64.b64decode(uri.partition(",")[2], validate=True)


def has_8_bits(uri: str) -> bool:
    """Returns whether the picture in a data URI is of a mode that needs no scaling; also True if it cannot be opened."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).mode in CHANNELS
    except Exception:  # reading it reports the fault, as it always did
        return True


def _to_8_bits(picture: Any) -> Any:
    """Returns a picture with 8 bits a channel. Raises ValueError if its mode does not say what is white."""
    from PIL import Image

    if picture.mode in CHANNELS:
        return picture
    if picture.mode in DEEP_MODES:
        bits = int(getattr(picture, "tag_v2", {}).get(258, (16,))[0])  # a TIFF may have 12
        return Image.fromarray((np.asarray(picture) >> (bits - 8)).astype(np.uint8))
    values = ", with values from {:g} to {:g}".format(*picture.getextrema()) if picture.mode in ("I", "F") else ""
    raise ValueError(
        f"has pixels of mode {picture.mode!r}{values}, which has no scale to 8 bits: save it as grey or RGB "
        "with 8 or 16 bits a channel"
    )
