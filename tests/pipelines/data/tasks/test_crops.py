"""Crops are rectangles of their pictures: the middle, or chosen by draws with the right probabilities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from raystride.pipelines.data.tasks.crops import MAX_ASPECT_RATIO, Crop, pack_with_size, resize_shorter_side, unpack_pixels


def _pictures(count: int, size: tuple[int, int, int], seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, *size), np.uint8))


@given(channels=st.sampled_from([1, 3]), height=st.integers(1, 300), width=st.integers(1, 300))
@settings(deadline=None, max_examples=20)
def test_packed_pictures_keep_pixels_and_size(channels: int, height: int, width: int) -> None:
    (picture,) = _pictures(1, (channels, height, width))
    for kind in (np.uint8, np.uint16, np.uint32):
        assert np.array_equal(unpack_pixels(pack_with_size(picture).astype(kind), channels), picture)


@given(height=st.integers(1, 200), width=st.integers(1, 200), shorter=st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_the_shorter_side_is_resized_with_its_aspect_kept(height: int, width: int, shorter: int) -> None:
    found = resize_shorter_side(Image.new("L", (width, height), 77), shorter)
    aspect = min(MAX_ASPECT_RATIO, max(height, width) / min(height, width))
    assert min(found.size) == shorter
    assert abs(max(found.size) - shorter * aspect) <= 1
    assert (found.width > found.height) <= (width > height)
    assert np.unique(np.asarray(found)).tolist() == [77]


def test_the_middle_of_a_long_picture_is_stored() -> None:
    pixels = np.zeros((10, 100), np.uint8)
    pixels[:, 30:70] = 255
    assert np.asarray(resize_shorter_side(Image.fromarray(pixels), 10)).tolist() == np.full((10, 40), 255).tolist()


@given(height=st.integers(4, 12), width=st.integers(5, 12))
@settings(deadline=None, max_examples=30)
def test_the_middle(height: int, width: int) -> None:
    pictures = _pictures(2, (3, height, width))
    found = Crop((3, 4, 5)).cut_middle(pictures)
    top, left = (height - 4) // 2, (width - 5) // 2
    assert np.array_equal(found, np.stack(pictures)[:, :, top : top + 4, left : left + 5])


@given(down=st.floats(0, 1, exclude_max=True), right=st.floats(0, 1, exclude_max=True), turn=st.floats(0, 0.9375))
@settings(deadline=None, max_examples=60)
def test_a_drawn_place_is_a_stretch_of_the_padded_picture(down: float, right: float, turn: float) -> None:
    (picture,) = _pictures(1, (3, 6, 7))
    crop = Crop((3, 4, 5), "random", padding=2, flip=0.5)
    (found,) = crop.cut_randomly([picture], np.array([[turn, down, right]]))
    found = found[..., ::-1] if turn < 0.5 else found
    padded = np.pad(picture, ((0, 0), (2, 2), (2, 2)))
    top, left = int(down * 7), int(right * 7)
    assert np.array_equal(found, padded[:, top : top + 4, left : left + 5])


def test_every_place_and_both_sides_are_equally_probable() -> None:
    picture = np.arange(36, dtype=np.uint8).reshape(1, 6, 6)
    crop = Crop((1, 5, 5), "random", padding=0, flip=0.5)
    draws = np.random.default_rng(1).random((4000, crop.draws))
    corners = crop.cut_randomly([picture] * 4000, draws)[:, 0, 0, 0]
    values, counts = np.unique(corners, return_counts=True)
    assert values.tolist() == [0, 1, 4, 5, 6, 7, 10, 11]
    assert np.abs(counts - 500).max() < 6 * np.sqrt(500)  # six standard deviations of a binomial count


@pytest.mark.parametrize("shape", [(3, 40, 60), (1, 64, 32), (3, 16, 16), (3, 8, 64)])
def test_rectangles_are_inside_with_such_areas_and_aspects(shape: tuple[int, int, int]) -> None:
    crop = Crop((shape[0], 16, 16), "scaled", scale=(0.2, 0.6))
    areas = []
    for draw in np.random.default_rng(2).random((500, crop.draws)):
        top, left, rows, columns = crop._draw_rectangle(*shape[1:], draw)
        assert 0 <= top <= top + rows <= shape[1]
        assert 0 <= left <= left + columns <= shape[2]
        assert 3 / 4 * (columns - 0.5) / (columns + 0.5) * 0.9 <= columns / rows <= 4 / 3 * 1.2
        areas.append(rows * columns / (shape[1] * shape[2]))
    if shape[1:] != (8, 64):  # where most rectangles do not fit, the middle is taken
        assert 0.15 < min(areas) < 0.3 < 0.5 < max(areas) < 0.66
        assert 0.3 < float(np.mean(areas)) < 0.5
    found = crop.cut_randomly(_pictures(4, shape), np.random.default_rng(3).random((4, crop.draws)))
    assert found.shape == (4, shape[0], 16, 16)
    assert found.dtype == np.uint8


@pytest.mark.parametrize(("slant", "aspect"), [(0.0, 3 / 4), (0.25, 6 / 7), (0.5, 1.0), (0.75, 7 / 6), (1.0, 4 / 3)])
def test_aspects_go_from_three_quarters_to_four_thirds(slant: float, aspect: float) -> None:
    crop = Crop((3, 8, 8), "scaled", scale=(0.25, 0.25))
    draw = np.zeros(crop.draws)
    draw[4] = slant
    _, _, rows, columns = crop._draw_rectangle(4000, 4000, draw)
    assert columns / rows == pytest.approx(aspect, rel=1e-3)  # of whole pixels
    assert rows * columns == pytest.approx(0.25 * 4000**2, rel=1e-3)


def test_a_scaled_rectangle_shows_its_content() -> None:
    half = np.zeros((3, 32, 32), np.uint8)
    half[:, :, 16:] = 200
    crop = Crop((3, 8, 8), "scaled", scale=(1.0, 1.0))
    draw = np.full((1, crop.draws), 0.5)  # an aspect of one: all of it
    (found,) = crop.cut_randomly([half], draw)
    assert found[:, :, :3].max() == 0
    assert found[:, :, 5:].min() == 200


def test_nothing_is_drawn_unless_something_varies() -> None:
    assert [Crop((3, 4, 4)).draws, Crop((3, 4, 4), flip=0.5).draws] == [0, 1]
    pictures = _pictures(3, (3, 4, 4))
    never = Crop((3, 4, 4), flip=1.0).cut_randomly(pictures, np.zeros((3, 1)))
    assert np.array_equal(never, np.stack(pictures)[..., ::-1])
