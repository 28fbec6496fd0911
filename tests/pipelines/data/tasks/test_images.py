"""Images as fed to a convolutional network: exact pixels, of one size, in one or three channels."""

import base64
import io
import itertools
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from raystride.pipelines.config import Config, DataConfig, ModelConfig, SettingError
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.loader import Loader
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.samples import open_samples
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.fingerprint import (
    compute_fingerprint,
    find_fingerprint,
    known_fingerprints,
)
from raystride.pipelines.data.prepare.one_source import prepare_source
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.fields import data_uri
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.images import Images
from raystride.pipelines.data.tasks.pictures import CHANNELS, DEEP_MODES, open_picture, picture_size, read_picture_size
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.tiny import tiny


def _uri(pixels: np.ndarray, kind: str = "PNG") -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _task(image: list[int] | None = None, **data: object) -> Images:
    config = Config(task="images", data=DataConfig(**data), model=ModelConfig(channels=(4,), hidden=(8,)))  # type: ignore[arg-type]
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
    with refused("data.image_size", None, names=["1x4x4, 1x5x5"]):
        task.learn([task.survey([(small, "a")]), task.survey([(large, "b")])])
    chosen = _task(image_size=(3, 8, 8))
    assert chosen.learn([chosen.survey([(small, "a"), (large, "b")])])["image"] == [3, 8, 8]


@pytest.mark.parametrize(("kind", "by_header"), [("PNG", 4), ("JPEG", 8), ("WEBP", 8), ("BMP", 4), ("GIF", 0), ("TIFF", 0)])
def test_a_size_by_the_header_is_that_of_the_picture(kind: str, by_header: int) -> None:
    found = []
    for mode, orientation in itertools.product(("L", "RGB", "P", "RGBA", "1"), (None, 3, 6, 8)):
        exif, stream = Image.Exif(), io.BytesIO()
        exif.update({0x0112: orientation} if orientation else {})
        with suppress(OSError, ValueError):  # a mode that the format does not have
            Image.new(mode, (5, 3)).save(stream, kind, **({"exif": exif} if orientation else {}))
            uri = data_uri(stream.getvalue())
            found.append((read_picture_size(uri), picture_size(open_picture(uri))))
    assert len([size for size, _ in found if size]) >= by_header
    assert all(size in (None, expected) for size, expected in found)


def test_a_survey_decodes_one_picture_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def load(file: ImageFile.ImageFile) -> object:
        decoded.append(str(file.size))
        return loaded(file)

    loaded = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 4, 5), np.uint8)
    sizes = _task().survey([(_uri(picture), "a") for picture in pixels])["sizes"]
    assert sizes == {"1x4x5": 40}
    assert len(decoded) <= 4, "Pillow's functions call it for each step with a picture"


def test_images_are_scaled_only_if_set() -> None:
    picture = _uri(np.full((5, 5), 200, np.uint8))
    row, _ = _task([3, 8, 8], image_size=(3, 8, 8)).encode((picture, "0"))
    assert row.tolist() == [0, *[200] * (3 * 8 * 8)]
    with pytest.raises(ValueError, match=r" \(1, 5, 5\) .* \(1, 4, 6\)"):
        _task().encode((picture, "0"))


def _png(chunk: bytes = b"", size: tuple[int, int] = (4, 6)) -> str:
    """Returns a PNG of that size without pixels, and with a given chunk."""
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
def test_invalid_images_raise(uri: str) -> None:
    with pytest.raises(ValueError, match="is no image that can be read"):
        _task().encode((uri, "0"))


def _photo(height: int, width: int, turned: int = 0) -> str:
    """Returns a picture, left half dark and right half bright, as stored by a rotated camera."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :] = 255
    picture, exif, stream = Image.fromarray(pixels), Image.Exif(), io.BytesIO()
    if turned == 6:
        picture, exif[0x0112] = picture.transpose(Image.Transpose.ROTATE_90), 6
    picture.save(stream, "PNG", exif=exif)
    return data_uri(stream.getvalue())


def test_pictures_are_upright_and_keep_their_aspect() -> None:
    task = _task([3, 8, 8], image_size=(3, 8, 8), image_shorter_side=10)
    rows = [task.encode((_photo(20, 40, turned), "1"))[0] for turned in (0, 6)]
    assert [len(row) for row in rows] == [1 + 4 + 3 * 10 * 20] * 2
    assert np.array_equal(*rows)
    (images,), _ = task.collate(rows, None)
    assert images.shape == (2, 3, 8, 8)
    assert (images[..., :3] == 0).all()
    assert (images[..., 5:] == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK"])
def test_every_kind_of_picture_is_taken(kind: str, mode: str) -> None:
    stream = io.BytesIO()
    picture = Image.new("RGB", (30, 20), (204, 204, 204)).convert(mode)
    picture = picture if kind != "JPEG" or mode not in ("RGBA", "P") else picture.convert("RGB")
    picture = picture if kind == "JPEG" or mode != "CMYK" else picture.convert("RGB")
    picture.save(stream, kind)
    task = _task([3, 8, 8], image_size=(3, 8, 8), image_shorter_side=8)
    (images,), _ = task.collate([task.encode((data_uri(stream.getvalue()), "0"))[0]], None)
    assert ((images.int() - 204).abs() <= 3).all()


VARIED = {"image_crop": "random", "image_padding": 2, "image_flip": 0.5}
SCALED = {"image_crop": "scaled", "image_shorter_side": 12, "image_flip": 0.5}


def _load_pictures(folder: Path, **data: object) -> "tuple[Callable[..., dict[int, bytes]], int]":
    """Returns a function from positions to the pictures that a loader feeds, and the samples of an epoch."""
    random = np.random.default_rng(7)
    for number in range(80):
        (folder / "data" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (10, 12), np.uint8)
        Image.fromarray(pixels).save(folder / "data" / str(number % 2) / f"{number}.png")
    own = DataConfig(source=str(folder / "data"), image_size=(1, 8, 8), **data)  # type: ignore[arg-type]
    config = replace(tiny(folder, data=own), task="images", model=ModelConfig(channels=(4,), hidden=(8,)))
    made = prepare(RunContext(config, Folder.from_uri(str(folder)), log=lambda _: None), build_task(config), on_ray=False)
    task = build_task(config, made.manifest.facts)
    samples = open_samples(
        config.train, config.seed, task, TokenStream(made.folder, made.manifest, "train", NodeCache(folder, 1 << 30))
    )
    plan = Plan(Order(samples.num_samples, 5), slots=6, slot_size=3, epochs=2)

    def fed(world: int = 1, first: int = 0, group: int = 1) -> dict[int, bytes]:
        found = {}
        for rank in range(world):
            loader = Loader(plan, samples, rank, world, micro_batch_slots=group)
            for step in map(loader.read_step, range(first, int(plan.steps))):
                for batch in step.micro_batches:
                    for at, image in enumerate(batch.inputs[0], step.position + batch.slot * plan.slot_size):
                        found[at] = image.numpy().tobytes()
        return found

    return fed, samples.num_samples


@pytest.mark.parametrize("data", [VARIED, SCALED], ids=["random", "scaled"])
def test_pictures_vary_by_seed_epoch_and_sample_alone(tmp_path: Path, data: dict[str, object]) -> None:
    fed, num_samples = _load_pictures(tmp_path, **data)
    alone = fed()
    assert len(alone) == 2 * num_samples
    assert all(fed(world, group=group) == alone for world, group in [(2, 1), (3, 2), (1, 6)])
    assert fed(first=3) == {at: picture for at, picture in alone.items() if at >= 3 * 18}
    plain = set(_load_pictures(tmp_path, image_shorter_side=data.get("image_shorter_side"))[0]().values())
    assert sum(picture not in plain for picture in alone.values()) > 0.7 * len(alone)
    first, second = ({alone[at] for at in range(start, start + num_samples)} for start in (0, num_samples))
    assert len(first & second) < 0.3 * num_samples


@pytest.mark.parametrize("side", [None, 12])
def test_pictures_do_not_vary_unless_that_is_asked_for(tmp_path: Path, side: int | None) -> None:
    fed, num_samples = _load_pictures(tmp_path, image_shorter_side=side)
    alone = fed()
    first, second = ({alone[at] for at in range(start, start + num_samples)} for start in (0, num_samples))
    assert first == second
    assert len(first) == num_samples
    assert _task(image_size=(1, 8, 8)).shaped_by() == {"image_size": (1, 8, 8)}


def test_pixels_are_normalised_by_the_network() -> None:
    task = _task([3, 4, 4], image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 1.0, 2.0))
    torch.manual_seed(0)
    model = task.build_model()
    torch.manual_seed(0)
    plain = _task([3, 4, 4]).build_model()
    assert model.state_dict().keys() == plain.state_dict().keys()
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    mean, deviation = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    # What the plain network makes of pixels p is what it makes of (p - 1/2) / (1/2).
    wanted = plain.logits((images / 255.0 - mean) / deviation / 2 + 0.5)
    assert torch.allclose(model.logits(images), wanted, atol=1e-5)
    with pytest.raises(SettingError, match=r"data.image_mean"):
        _task([1, 4, 4], image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 1.0, 2.0)).build_model()


@pytest.mark.parametrize(
    ("data", "setting", "names"),
    [
        ({"image_shorter_side": 9}, "image_shorter_side", ("data.image_size",)),
        ({"image_shorter_side": 9, "image_size": (3, 8, 10)}, "image_shorter_side", ()),
        ({"image_crop": "random"}, "image_crop", ("data.image_padding",)),
        ({"image_padding": 3}, "image_padding", ("data.image_crop random",)),
        ({"image_crop": "scaled", "image_scale": (0.9, 0.2)}, "image_scale", ()),
        ({"image_crop": "scaled", "image_scale": (0.0, 0.2)}, "image_scale", ()),
        ({"image_flip": 1.5}, "image_flip", ()),
        ({"image_mean": (0.5,)}, "image_std", ()),
        ({"image_mean": (0.5,), "image_std": (0.0,)}, "image_std", ()),
        ({"image_mean": (0.5,), "image_std": (0.5,), "image_size": (3, 8, 8)}, "image_mean", ()),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data: dict[str, object], setting: str, names: tuple[str, ...]) -> None:
    with refused(f"data.{setting}", data.get(setting, ANY), names=names):
        DataConfig(**data)  # type: ignore[arg-type]


def _file(pixels: np.ndarray | Image.Image, form: str) -> str:
    stream = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(stream, form)
    return data_uri(stream.getvalue())


def _grey(uri: str) -> list[int]:
    task = _task([1, 16, 16], image_size=(1, 16, 16))
    return task.encode((uri, "0"))[0][1:].tolist()


RAMP = np.arange(256).reshape(16, 16)
DEEP = {
    "PNG, 16 bits": _file((RAMP * 257).astype(np.uint16), "PNG"),
    "TIFF, 16 bits": _file((RAMP * 257).astype(np.uint16), "TIFF"),
    "TIFF, 16 bits, high byte first": _file(Image.fromarray((RAMP * 257).astype(">u2")), "TIFF"),
    "8 bits": _file(RAMP.astype(np.uint8), "PNG"),
    "grey and alpha": _file(Image.fromarray(RAMP.astype(np.uint8)).convert("LA"), "PNG"),
    "palette": _file(Image.fromarray(RAMP.astype(np.uint8)).convert("P"), "PNG"),
    "RGB": _file(Image.fromarray(RAMP.astype(np.uint8)).convert("RGB"), "PNG"),
    "CMYK": _file(Image.fromarray(RAMP.astype(np.uint8)).convert("RGB").convert("CMYK"), "TIFF"),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_ramp_keeps_all_its_levels_in_any_mode(name: str) -> None:
    assert _grey(DEEP[name]) == list(range(256))


def test_a_tiff_of_12_bits_is_scaled_by_12() -> None:
    content = bytearray(base64.b64decode(DEEP["TIFF, 16 bits"].partition(",")[2]))
    # Two pixels of 12 bits are three bytes.
    values = (RAMP * 4095 // 255).reshape(-1, 2)
    packed = bytes(byte for a, b in values.tolist() for byte in (a >> 4, (a & 15) << 4 | b >> 8, b & 255))
    with Image.open(io.BytesIO(content)) as picture:
        (start,) = picture.tag_v2[273]  # type: ignore[attr-defined]
    content[start : start + len(packed)] = packed
    entry = content.index(struct.pack("<HHI", 258, 3, 1))
    content[entry + 8 : entry + 10] = struct.pack("<H", 12)
    strip = content.index(struct.pack("<HHI", 279, 4, 1))
    content[strip + 8 : strip + 12] = struct.pack("<I", len(packed))
    assert _grey(data_uri(bytes(content))) == list(range(256))


@pytest.mark.parametrize(
    ("pixels", "mode"),
    [(np.float32(RAMP / 255), "F"), ((RAMP * 6).astype(np.int32), "I"), (Image.new("LAB", (16, 16)), "LAB")],
)
def test_a_mode_without_a_scale_is_refused_by_its_name(pixels: np.ndarray, mode: str) -> None:
    uri = _file(pixels, "TIFF")
    with pytest.raises(ValueError, match=f"has pixels of mode '{mode}'.*8 or 16 bits"):
        _task([1, 16, 16], image_size=(1, 16, 16)).encode((uri, "0"))
    task = _task()
    with refused("data.image_size", None, names=[f"mode '{mode}'"]):
        task.learn([task.survey([(uri, "a"), (uri, "b")])])


def test_all_modes_that_pillow_has_are_read_or_refused_by_name() -> None:
    """None is clipped: a mode that a later version of Pillow brings is refused as well."""
    assert {*Image.MODES} - {*CHANNELS, *DEEP_MODES} <= {"F", "I", "LAB", "La"}


@pytest.mark.parametrize("deep", [False, True])
def test_pictures_that_come_as_before_are_found_as_before(tmp_path: Path, deep: bool) -> None:
    for number in range(20):
        path = tmp_path / "data" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint16 if deep and number == 19 else np.uint8)).save(path)
    config = replace(tiny(tmp_path, data=DataConfig(source=str(tmp_path / "data"), validation_fraction=0.3)), task="images")
    task, storage = build_task(config), Folder.from_uri(str(tmp_path / "runs"))
    sources = open_sources(config, task)
    before = compute_fingerprint(config, task, *sources, with_reading=False)
    prepare_source(RunContext(config, storage, log=lambda _: None), task, fingerprint=before, on_ray=False)
    assert (find_fingerprint(config, task, *sources, storage=storage) == before) == (not deep)
    assert before in known_fingerprints(config, task, *sources), "a run of 0.3 goes on with it"
    (storage / ".prepared" / before).remove("manifest.json")
    lines: list[str] = []
    prepare_source(RunContext(config, storage, log=lines.append), task, on_ray=False)
    assert next(before in line and "earlier version" in line for line in lines)
    (storage / ".prepared").remove(find_fingerprint(config, task, *sources))
    assert find_fingerprint(config, task, *sources, storage=storage) != before, "it would go on by other rules"
